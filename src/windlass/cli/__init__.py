"""The command line: one file per command group, thin over wire."""
