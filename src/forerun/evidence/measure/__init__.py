"""Measures kernels and fits cost profiles to them."""
