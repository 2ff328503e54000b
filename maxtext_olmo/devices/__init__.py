"""Where batches go: the rows a process needs, and global arrays on a mesh."""
