"""This wing answers questions about Programs: predictions, searches over plans, experiments, whole runs and jobs."""
