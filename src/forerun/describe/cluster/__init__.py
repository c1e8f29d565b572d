"""On what it is trained: devices, links, clusters."""
