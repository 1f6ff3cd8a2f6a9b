"""`plan=search`: the fastest layouts for a number of GPUs, or for several numbers."""
