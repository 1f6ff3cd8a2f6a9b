"""What a batch is: records, tokenization, the order of samples, and the loader of each pipeline stage.

Knows nothing of models/, of training/, of Hydra or of the engine. Read in this order: records, sample, sft, tokenized,
order, loader.
"""
