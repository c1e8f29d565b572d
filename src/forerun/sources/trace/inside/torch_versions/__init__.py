"""The versions of torch that can be traced, and adapters for the internals that each lacks."""
