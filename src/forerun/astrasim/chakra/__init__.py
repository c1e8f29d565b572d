"""Chakra execution traces: files with the operations of each rank of a job."""
