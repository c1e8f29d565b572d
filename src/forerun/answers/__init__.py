"""This wing answers the questions of users about Programs: predictions, searches over plans, experiments, whole runs
and jobs.
"""
