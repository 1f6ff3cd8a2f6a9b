"""The building blocks of layers, for every family: the tensors between them, masks and positions, replaced kernels."""
