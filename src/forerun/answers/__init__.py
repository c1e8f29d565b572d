"""This wing answers what users ask of Programs: predictions, searches over plans, experiments, whole runs and jobs."""
