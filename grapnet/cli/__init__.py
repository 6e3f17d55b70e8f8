"""The command line: `grapnet --help`."""
