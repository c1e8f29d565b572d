"""torchtitan's trainer, from its own configurations."""
