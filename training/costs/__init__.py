"""The costs of layers: FLOPs, bytes, and the machine that they run on."""
