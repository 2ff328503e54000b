"""What a run did see and will see."""
