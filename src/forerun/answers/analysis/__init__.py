"""What a simulation means: breakdown, bottleneck, figures a user reads."""
