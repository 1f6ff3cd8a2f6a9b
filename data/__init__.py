"""What a batch is: records, tokenization, packing, the order of rows, and the loader of each pipeline stage.

Knows nothing of models/, of training/, of Hydra or of the engine. Read in this order: formats, records, sample, sft,
length, encoding, tokenizing, tokenized, packing, rows, order, loader.
"""
