"""`python -P -m windlass.worker.check_handler PACKAGE.MODULE:FUNCTION [inline]`: can a worker run it from here?

Exits with NOT_FOUND, and the sentence a worker would end with on standard output, if it cannot. In a process of its
own: what importing does, and whether it ever ends, is the handler's business.
"""

import asyncio
import os
import sys

from windlass.model.errors import HandlerNotFound
from windlass.worker.handler import load_handler
from windlass.worker.inline import InlineExecutor

NOT_FOUND = 2


def main(handler: str, is_inline: bool) -> None:
    # What the module prints is not our answer.
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
    # Threads that the module began would keep Python waiting.
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1], "inline" in sys.argv[2:])
