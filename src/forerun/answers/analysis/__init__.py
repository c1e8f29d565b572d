"""Reads simulations: breakdown, bottlenecks, and the figures of a Prediction."""
