"""PyTorch's own parallelism applied to a module as a plan says, and the training loop around it."""
