"""torch.compile without code generation: torch's own capture, and the kernels that Inductor would make."""
