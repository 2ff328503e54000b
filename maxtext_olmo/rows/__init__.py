"""Rows and batches: what they hold, and how they are read."""
