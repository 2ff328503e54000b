"""Where bytes come from: the `Storage` protocol and its implementations."""
