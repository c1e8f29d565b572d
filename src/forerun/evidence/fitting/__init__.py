"""Fits the constants that only whole training steps determine, and corrects them by a user's own steps."""
