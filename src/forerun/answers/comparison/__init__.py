"""This package compares a profiled step with its prediction: where they differ, and what corrects the prediction."""
