"""What the machine can do, measured: the device under a path, memory, and the roofs that fit them."""
