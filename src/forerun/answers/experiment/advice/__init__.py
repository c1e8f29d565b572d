"""Recommendations for a run. Forerun simulates each one before it recommends it."""
