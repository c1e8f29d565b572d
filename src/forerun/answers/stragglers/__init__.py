"""Finds the cost of stragglers in a real job: it replays recorded operations as they were, and with equal times."""
