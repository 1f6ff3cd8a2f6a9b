"""Where the curves of a run are shown besides its own page: one file per tracker, one interface."""
