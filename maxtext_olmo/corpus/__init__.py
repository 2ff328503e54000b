"""The corpus: its token files, its documents, and the storage that reads them."""
