"""The world of ASTRA-sim: Chakra traces, STAGE's models, message-level simulation, design-space exploration."""
