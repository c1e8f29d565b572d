"""What users ask of Programs: predictions and their analysis, searches over plans, experiments, whole runs and jobs."""
