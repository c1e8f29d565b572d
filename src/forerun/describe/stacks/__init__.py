"""With which framework it is trained: one file holds all that Forerun knows of a framework."""
