"""Which row comes at which position."""
