"""The planner in the browser: pages send questions to a small server on the user's machine, which computes the answers
of the commands."""
