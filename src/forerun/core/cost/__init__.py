"""The cost of a Program's operations: their time on the device and on the host."""
