"""Recipes: the configuration files of training tools, and the names that each tool has for the fields of a plan."""
