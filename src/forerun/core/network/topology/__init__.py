"""Topologies: the devices and links of a network, and the routes of messages. Each file has one small class."""
