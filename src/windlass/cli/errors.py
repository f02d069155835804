"""Exit codes and error messages. Every start of the program imports this module, so it imports little."""

import json
import sys

from windlass.worker.nonblocking_stderr import standard_error

EXIT_BAD_INPUT = 2
# The control plane declared this worker lost, or its token is no longer valid.
EXIT_LOST = 3
# Exit codes that shells use for a program ended by SIGTERM and by SIGPIPE.
EXIT_TERMINATED = 143
EXIT_BROKEN_PIPE = 141


def print_error(message: str) -> None:
    """Print the message on standard error, on one line. With --json, print a JSON object."""
    text = " ".join(message.split())
    # Pending log lines come first.
    standard_error.drain()
    print(json.dumps({"error": text}) if "--json" in sys.argv else f"windlass: {text}", file=sys.stderr)
