"""Message-level simulation of collectives and sends: what each message waits for, and when it arrives."""
