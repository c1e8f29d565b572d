"""torch.compile without its compiler: torch's own capture, and the kernels that Inductor would make."""
