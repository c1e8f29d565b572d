"""Explorations of a design space: workloads x systems x strategies, generated and replayed."""
