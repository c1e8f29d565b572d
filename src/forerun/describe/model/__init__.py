"""The models that are trained: architectures from config.json, presets or YAML."""
