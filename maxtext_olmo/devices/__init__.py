"""Where a batch goes on the mesh."""
