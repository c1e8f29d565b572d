"""The Program, and everything that turns a Program into time and bytes: costs, network, engine, memory."""
