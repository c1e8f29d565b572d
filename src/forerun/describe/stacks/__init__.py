"""Training frameworks; one file holds all that Forerun knows of each."""
