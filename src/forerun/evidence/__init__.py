"""Evidence for the figures: microbenchmarks, fitted constants, published measurements."""
