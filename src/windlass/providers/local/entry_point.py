"""Entry point of a local worker process: `python -m windlass.providers.local.entry_point LOG MODULE ARGUMENTS...`

Starts a thread that bounds the log for as long as the process lives, then runs `python -m MODULE ARGUMENTS...`.
"""

import faulthandler
import runpy
import sys
import threading
from pathlib import Path

from windlass.providers.local.logs import bound_log


def main() -> None:
    log, module, *arguments = sys.argv[1:]
    # A crash of the interpreter prints its location into the log.
    faulthandler.enable()
    threading.Thread(target=bound_log, args=(Path(log),), name="windlass-log", daemon=True).start()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
