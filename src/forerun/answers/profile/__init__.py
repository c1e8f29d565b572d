"""What a profile says: HTA's tables under its rules, and the facts of a file."""
