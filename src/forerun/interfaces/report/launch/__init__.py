"""A plan as the configuration files of the tool that is to run it; one module a tool."""
