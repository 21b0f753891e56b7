"""The command `stride`: one file per subcommand, each with `add_parser(subparsers)` and `run(args) -> int`."""
