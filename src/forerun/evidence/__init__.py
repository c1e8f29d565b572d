"""How the figures are kept true: microbenchmarks, fitted constants, published measurements."""
