"""What a local worker's process runs first: `python -m windlass.providers.local.launch LOG MODULE ARGUMENTS...`

It sees to it that the log stays short, for as long as the process lives and whoever else does not, and then becomes
`python -m MODULE ARGUMENTS...`.
"""

import faulthandler
import runpy
import sys
import threading
from pathlib import Path

from windlass.providers.local.logs import keep_short


def main() -> None:
    log, module, *arguments = sys.argv[1:]
    # A crash of the interpreter itself says where, in the log.
    faulthandler.enable()
    threading.Thread(target=keep_short, args=(Path(log),), name="windlass-log", daemon=True).start()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
