"""This package compares a profiled step with its prediction: their differences, and corrections of the prediction."""
