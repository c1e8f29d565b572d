"""What every other room stands on: errors, units, files, digests, compiled functions, processes, stores."""
