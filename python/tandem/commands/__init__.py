"""Subcommands of `tandem` that the Python package adds to those of the program."""
