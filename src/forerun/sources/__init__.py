"""Writers of Programs: a model and its plan, or a PyTorch program that is traced."""
