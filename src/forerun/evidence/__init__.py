"""Evidence that keeps the figures true: microbenchmarks, fitted constants, published measurements."""
