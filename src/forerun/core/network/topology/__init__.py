"""Topologies: which devices and links a network has, and which way a message takes. One small class a file."""
