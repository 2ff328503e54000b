"""What a row, and a batch, holds."""
