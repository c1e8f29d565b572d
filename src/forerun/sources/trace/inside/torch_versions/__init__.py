"""The versions of torch that can be traced, and what each lacks of the internals that the tracer is written for."""
