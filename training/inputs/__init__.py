"""From the data keys of a run to tokenized files, loaders of each stage, and the number of steps."""
