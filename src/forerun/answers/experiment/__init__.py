"""Experiments: one description of a run, simulated iteration by iteration, and studies of it."""
