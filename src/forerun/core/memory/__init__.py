"""Memory over time: allocated memory from the lifetimes of tensors, reserved memory from the caching allocator."""
