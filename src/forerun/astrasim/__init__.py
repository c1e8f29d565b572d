"""ASTRA-sim and its tools: Chakra traces, STAGE's models, message-level simulation, design-space exploration."""
