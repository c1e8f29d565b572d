"""Collectives on the links of a cluster."""
