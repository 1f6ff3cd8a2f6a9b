"""Files of tensors and the folders that hold them: read, written, replaced as a whole."""
