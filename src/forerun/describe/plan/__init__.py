"""The plan of a model's training: mesh, batch, precision, checkpointing, pipeline schedule."""
