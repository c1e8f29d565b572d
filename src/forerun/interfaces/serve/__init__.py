"""A planner in the browser, on the user's own machine: pages ask a small server, which asks what the commands ask."""
