"""Analyses profiles: HTA's tables under its rules, and the contents of a file."""
