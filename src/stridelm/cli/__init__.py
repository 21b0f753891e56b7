"""The command `stride`: one file a subcommand, each with `add_parser(subparsers)` and `run(args) -> int`."""
