"""Find the best plan of a space."""
