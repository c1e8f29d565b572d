"""What is trained: architectures, from config.json, presets or YAML."""
