"""The trainer's view of the data: dataset types, the iterator, its state, and resume."""
