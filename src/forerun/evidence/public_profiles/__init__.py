"""Public profiles: how well their steps replay, and how well they predict the same step on another machine."""
