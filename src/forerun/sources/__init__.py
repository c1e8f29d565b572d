"""Sources of Programs: a model with a plan, a traced PyTorch program, or a profile."""
