"""Chakra execution traces: files that say what each rank of a job executes."""
