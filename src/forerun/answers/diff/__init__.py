"""Shows how a change of a program affects its step: time and memory, by kernel, collective, tensor and module."""
