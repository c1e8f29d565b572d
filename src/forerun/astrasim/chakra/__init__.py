"""Chakra execution traces: what every rank of a job executes, as files."""
