"""Advice: what would help a run, each simulated before it is given."""
