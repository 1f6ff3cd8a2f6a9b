"""The config of a run: the typed schema, the checks of its values, and the features that do not go together."""
