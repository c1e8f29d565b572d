"""Attention kernels and dispatchers of tokens: one entry for each, with all that Forerun knows of it."""
