"""Forerun: run your training before you run it."""
