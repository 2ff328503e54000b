"""Rows and batches: their content, and how they are read."""
