"""Fit cost profiles to measured kernels."""
