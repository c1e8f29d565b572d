"""Constants that only whole training steps tell: fitted to measured ones, and corrected by a user's own."""
