"""The placement of batches on the mesh."""
