"""What a run will see of its data, shown before it starts."""
