"""Model x plan -> Program."""
