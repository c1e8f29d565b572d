"""Public profiles: how well their steps replay, and what one machine's profile says of a step on another machine."""
