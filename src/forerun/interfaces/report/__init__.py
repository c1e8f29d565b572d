"""Predictions and searches as text, JSON, CSV and traces."""
