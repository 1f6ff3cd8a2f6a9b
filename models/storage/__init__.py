"""Files of tensors and the folders that they lie in: read, written, replaced as a whole."""
