"""Inspection of a run: the data that it has seen and will see."""
