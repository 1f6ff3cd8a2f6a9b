"""The command line and sweeps over it. It runs before torch is imported, so it imports only config and distributed."""
