"""What tokens there are, and how to get their bytes."""
