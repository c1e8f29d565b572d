"""Unit constants. Memory is in GiB (2**30 bytes), links and rates in powers of ten."""

KIB = 2**10
MIB = 2**20
GIB = 2**30
GIGA = 10**9
TERA = 10**12
PS_PER_S = 10**12
PS_PER_US = 10**6
