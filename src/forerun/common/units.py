"""Unit constants. Memory is in GiB (2**30 bytes), links and rates in powers of ten."""

KIB = 2**10
MIB = 2**20
GIB = 2**30
GIGA = 10**9
TERA = 10**12
PS_PER_S = 10**12
PS_PER_US = 10**6
PS_PER_NS = 10**3
NS_PER_S = 10**9
MS = 1e-3
"""seconds of a millisecond"""
US = 1e-6
"""seconds of a microsecond"""
NS = 1e-9
"""seconds of a nanosecond"""
HOUR_S = 3_600.0
DAY_S = 86_400.0
