"""Tidies up after `windlass demo`, however the demo ends: `python -m windlass.demo.cleanup FOLDER MARK`.

Workers outlive their orchestrator by design; those of a demonstration should not. This process waits for the end of its
standard input, which the demo holds open and the kernel closes even for one that was killed. Then it ends every process
that carries the mark in its environment, or lives in the folder as emulated machines do; stops the PostgreSQL in the
folder; and deletes the folder. Only who kills this process too must do that by hand.
"""

import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from windlass.model.errors import WindlassError
from windlass.store.embedded import EmbeddedPostgres

# Every demo's own, inherited by all that it starts.
MARK = "_WINDLASS_DEMO"
# What is killed may have forked a moment before; this often we look again.
MAX_ROUNDS = 50
END_TIMEOUT_S = 5.0


def main() -> None:
    folder, mark = Path(sys.argv[1]), sys.argv[2]
    # Ctrl-C and the end of the terminal are the demo's business.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    for _ in range(MAX_ROUNDS):
        remains = _remains(folder, mark)
        if not remains:
            break
        for process in remains:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(remains, END_TIMEOUT_S)
    data_dir = folder / "data"
    if (data_dir / "postgres" / "postmaster.pid").exists():
        # A server whose last user was killed runs on, until somebody opens and closes it.
        with suppress(WindlassError), EmbeddedPostgres(data_dir):
            pass
    shutil.rmtree(folder, ignore_errors=True)


def _remains(folder: Path, mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_living = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            environment = process.environ() if is_living else {}
            if environment.get(MARK) == mark or environment.get("HOME", "").startswith(f"{folder}/"):
                found.append(process)
    return found


if __name__ == "__main__":
    main()
