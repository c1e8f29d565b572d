"""How it is trained: mesh, batch, precision, checkpointing, schedule, and the software stack."""
