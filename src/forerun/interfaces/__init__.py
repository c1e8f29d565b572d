"""The ways in which people reach Forerun: the Python interface, reports and pictures, the command line."""
