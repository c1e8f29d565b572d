"""Many jobs on one cluster: scheduling policies, placement and waiting."""
