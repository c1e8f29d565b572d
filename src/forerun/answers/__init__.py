"""What is asked of Programs: predictions and their analysis, searches over plans, experiments."""
