"""Whole runs: failures, checkpoints, recovery, and the goodput that is left of the steps."""
