"""A virtual CUDA device: the properties that C++ and torch.cuda see, and its choice of kernels."""
