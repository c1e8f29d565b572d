"""Message-level simulation of collectives and sends: the dependencies of each message, and its arrival."""
