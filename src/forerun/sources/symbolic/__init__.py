"""The symbolic source: builds the Program of a model under a plan, without PyTorch."""
