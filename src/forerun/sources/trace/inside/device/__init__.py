"""A CUDA device that is not there: what C++ and torch.cuda know of it, and which kernels it would choose."""
