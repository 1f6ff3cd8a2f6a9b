"""What a run is asked to do: the typed schema, the checks of its values, and what does not go together."""
