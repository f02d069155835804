"""`python -m windlass`: the command line."""

from windlass.cli.app import main

main()
