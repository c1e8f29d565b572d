"""Helpers that every other package uses: errors, units, files, arrays, digests, numba, processes, SQLite records."""
