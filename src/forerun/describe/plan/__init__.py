"""How it is trained: mesh, batch, precision, checkpointing, schedule."""
