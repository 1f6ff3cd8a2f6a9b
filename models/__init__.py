"""Models: the list of a model's layers, one file per architecture, and the loss on top.

Nothing here knows Hydra, the data or DeepSpeed's engine: a layer is an `nn.Module` over a tuple of tensors, and
`training/pipeline/module.py` turns the list into DeepSpeed's `LayerSpec`s.
"""
