"""From records to batches: tokenization, packing, the order of rows, and the loader of each pipeline stage.

It imports nothing from models/, training/, Hydra or the engine. Read in this order: formats, records, sample, sft,
length, encoding, tokenizing, tokenized, packing, rows, order, loader.
"""
