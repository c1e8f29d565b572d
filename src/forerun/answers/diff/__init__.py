"""Says what a change of a program does to its step: time and memory, by kernel, collective, tensor and module."""
