"""The record of a process is renewed whatever the process can no longer do."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from windlass.model.config import Config
from windlass.model.counters import CounterBuffer
from windlass.model.process import ProcessKind, ProcessRecord
from windlass.wiring.process_link import StartOrder
from windlass.wiring.process_record import new_record, recorded


class WrittenRecords:
    """A store of processes that keeps what is written."""

    def __init__(self) -> None:
        self.records: list[ProcessRecord] = []

    async def record_process(self, process: ProcessRecord) -> None:
        self.records.append(process)

    async def add_counters(self, increments: Any) -> None: ...

    async def remove_process(self, process_id: Any) -> None: ...


@contextmanager
def no_further_file() -> Iterator[None]:
    """This process may open no file: every number below the limit is in use."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_record_is_written_without_free_file_descriptors() -> None:
    store: Any = WrittenRecords()
    process = new_record(ProcessKind.SERVER, 0, "1.0")
    with no_further_file():
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        async with recorded(store, process, StartOrder(Config()), CounterBuffer(), gauges=lambda: {"connections": 2}):
            pass
    assert [record.gauges for record in store.records] == [{"connections": 2}]


async def test_record_has_the_memory_of_the_process() -> None:
    store: Any = WrittenRecords()
    async with recorded(store, new_record(ProcessKind.SERVER, 0, "1.0"), StartOrder(Config()), CounterBuffer()):
        pass
    (record,) = store.records
    assert record.gauges["memory_bytes"] > 1 << 20
