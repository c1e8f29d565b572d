"""The machines that a model is trained on: devices, links and clusters."""
