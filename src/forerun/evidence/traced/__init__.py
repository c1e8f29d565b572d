"""Measured rows whose program is public, predicted by tracing that program."""
