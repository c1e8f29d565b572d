"""Published measurements in, accuracy out."""
