"""`python -m windlass`: the command line, with this very Python."""

from windlass.cli.app import main

main()
