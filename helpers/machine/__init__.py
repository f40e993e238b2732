"""This machine's capabilities: GPUs, memory and CPU limits, disks, measured and published rates."""
