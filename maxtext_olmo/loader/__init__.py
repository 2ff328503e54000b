"""What a trainer holds: dataset types, the iterator, its state, and resume."""
