"""Discrete-event simulation of a Program."""
