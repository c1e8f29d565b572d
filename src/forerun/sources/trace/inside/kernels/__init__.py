"""What every operation of torch launches on the device."""
