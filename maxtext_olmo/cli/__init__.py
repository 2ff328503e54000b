"""The `maxtext-olmo` command: one module per subcommand."""
