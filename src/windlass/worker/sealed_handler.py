"""Handlers whose payloads and results are encrypted: the decorator `sealed`.

The payload is decrypted before the handler runs, in the handler's own process, and its result is encrypted before it
leaves that process. An exception is reported by its type only, because its message and traceback may quote the payload.
Progress notes are sent as they are.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from windlass.model.codec import CodecError, PayloadCodec, open_sealed, payload_context, result_context, seal
from windlass.worker.handler import DoNotRetry, Handler, RunningTask


class SealedHandlerError(Exception):
    """An error of a handler with a codec, without its message."""


def sealed(codec: PayloadCodec) -> Callable[[Handler], Handler]:
    """Decorate a handler, sync or async: `@windlass.sealed(codec)`."""

    def decorate(handler: Handler) -> Handler:
        if inspect.iscoroutinefunction(handler):

            @functools.wraps(handler)
            async def run_async(task: RunningTask) -> Any:
                opened = _open(task, codec)
                try:
                    result = await handler(opened)
                except Exception as error:
                    raise _without_message(error) from None
                return _seal(result, codec, task)

            return run_async

        @functools.wraps(handler)
        def run(task: RunningTask) -> Any:
            opened = _open(task, codec)
            try:
                result = handler(opened)
            except Exception as error:
                raise _without_message(error) from None
            return _seal(result, codec, task)

        return run

    return decorate


def _open(task: RunningTask, codec: PayloadCodec) -> RunningTask:
    try:
        payload = open_sealed(task.payload, codec, payload_context(task.queue), f"the payload of task {task.id}")
    except CodecError as error:
        # Another attempt would fail in the same way.
        raise DoNotRetry(str(error)) from None
    return replace(task, payload=payload)


def _seal(result: Any, codec: PayloadCodec, task: RunningTask) -> Any:
    try:
        return seal(result, codec, result_context(task.id))
    except Exception as error:
        raise _without_message(error) from None


def _without_message(error: Exception) -> Exception:
    name = type(error).__name__
    if isinstance(error, DoNotRetry):
        return DoNotRetry(f"the handler raised {name} (its message is withheld: the payload is encrypted)")
    if isinstance(error, MemoryError):
        return MemoryError()
    return SealedHandlerError(f"{name} (its message is withheld: the payload is encrypted)")
