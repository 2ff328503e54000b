"""What people run: the maxtext-olmo commands."""
