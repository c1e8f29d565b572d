"""The user's description as frozen types: the model, the plan of its parallel training, and the cluster."""
