"""The data of a run: from its config keys to tokenized files, the loaders of each stage and the number of steps."""
