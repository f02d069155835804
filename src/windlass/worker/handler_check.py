"""Checks that a worker can import a handler: `python -P -m windlass.worker.handler_check MODULE:FUNCTION [inline]`.

If not, prints the worker's error message on standard output and exits with NOT_FOUND. Runs as its own process, because
importing the module may print, hang or start threads.
"""

import asyncio
import os
import sys

from windlass.model.errors import HandlerNotFound
from windlass.worker.handler import load_handler
from windlass.worker.inline import InlineExecutor

NOT_FOUND = 2


def main(handler: str, is_inline: bool) -> None:
    # The module's own prints go to standard error; standard output is for the message.
    answer = os.dup(1)
    os.dup2(2, 1)
    code = 0
    try:
        if is_inline:
            asyncio.run(InlineExecutor(handler).start())
        else:
            load_handler(handler)
    except HandlerNotFound as error:
        os.write(answer, str(error).encode(errors="backslashreplace"))
        code = NOT_FOUND
    # A normal exit would wait for threads that the module started.
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1], "inline" in sys.argv[2:])
