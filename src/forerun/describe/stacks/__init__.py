"""Training frameworks. One file has everything that Forerun knows of each."""
