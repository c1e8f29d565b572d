"""Many jobs on one cluster: scheduling policies, placement, and what each job waits for."""
