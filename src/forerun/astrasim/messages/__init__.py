"""Collectives and sends that are simulated message by message: what a message waits for, and when it arrives."""
