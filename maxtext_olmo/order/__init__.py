"""The order of a run: which row is at which position."""
