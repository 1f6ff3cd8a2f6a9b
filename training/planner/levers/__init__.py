"""What each key adds to a plan: one file per lever, and the table over which a plan sums."""
