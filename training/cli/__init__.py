"""The command line and sweeps over it. Runs before torch is imported, so it imports config and distributed alone."""
