"""This package says what a profile tells: HTA's tables under its rules, and the facts of a file."""
