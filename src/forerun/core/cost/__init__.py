"""What the operations of a Program cost: their time on the device and on the host."""
