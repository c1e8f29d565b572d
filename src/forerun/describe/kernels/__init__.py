"""Attention kernels: one entry for each, with all that Forerun knows of it."""
