"""The hsloader command, one file a subcommand."""
