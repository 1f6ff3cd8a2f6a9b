"""Reports on the data of a run before it starts: counts, lengths, findings and decoded rows."""
