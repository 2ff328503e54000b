"""Who consumes it: an embedded trainer, and adapters to others."""
