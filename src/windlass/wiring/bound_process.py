"""Runs a command that is asked to stop when its parent ends, however that ends.

`python -m windlass.wiring.bound_process PARENT_PID COMMAND...`: a parent that was killed stops nothing itself, so the
command gets SIGTERM. Linux only; elsewhere the command just runs.
"""

import os
import signal
import sys

from windlass.wiring.process_link import signal_at_end_of_parent


def main() -> None:
    parent_pid, *command = sys.argv[1:]
    if not signal_at_end_of_parent(int(parent_pid), signal.SIGTERM):
        sys.exit("the parent has ended")
    os.execv(command[0], command)  # noqa: S606 - no shell


if __name__ == "__main__":
    main()
