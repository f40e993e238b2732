"""What this machine is and can do: GPUs, memory and CPU limits, disks, measured and published rates."""
