"""What layers are made of, for every family: what flows between them, masks and positions, replaced kernels."""
