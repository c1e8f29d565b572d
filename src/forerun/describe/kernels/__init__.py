"""Attention kernels, token dispatchers and optimizers. An entry of a data file has everything that Forerun knows of
each."""
