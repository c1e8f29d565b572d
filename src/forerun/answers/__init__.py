"""Questions that people ask of Programs: predictions and their analysis, searches over plans, experiments."""
