"""Tests of connections run on the event loop of server processes, whose transports differ from the standard ones."""

from collections.abc import Callable, Mapping
from typing import Any

import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], Any]]:
    return {"uvloop": uvloop.new_event_loop}
