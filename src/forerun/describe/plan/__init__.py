"""How a model is trained: mesh, batch, precision, checkpointing, pipeline schedule."""
