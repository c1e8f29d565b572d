"""Recipes: the files by which training tools are told what to train, and the words that each tool has for a plan."""
