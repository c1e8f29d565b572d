"""Writes a plan as the configuration files of a training tool; one module for each tool."""
