"""Attention kernels and token dispatchers; one entry in a data file holds all that Forerun knows of each."""
