"""What is saved of a run, how it is written whole, and how the newest whole one is found again."""
