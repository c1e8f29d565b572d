"""Whole training runs: failures, checkpoints, recovery and goodput."""
