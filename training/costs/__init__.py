"""What layers cost: FLOPs, bytes, and the machine that they run on."""
