"""Tensor lifetimes -> bytes over time."""
