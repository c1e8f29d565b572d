"""Predicts published measurements and reports the accuracy."""
