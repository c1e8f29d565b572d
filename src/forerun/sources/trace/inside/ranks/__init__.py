"""One process as any rank of a world of any size."""
