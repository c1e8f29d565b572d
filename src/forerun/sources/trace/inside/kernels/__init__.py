"""The kernels that each operation of torch launches on the device."""
