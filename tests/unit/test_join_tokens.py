"""Join tokens as the control loop creates them: one per remote machine, and stored only as a hash."""

import json
from random import Random
from typing import Any

from support.memory_store.stores import MemoryStores
from windlass.control.cycle import FleetCycle
from windlass.control.executor import CALL_TIMEOUT_S
from windlass.model.auth import JOIN_PREFIX, Activation, hash_of, is_token
from windlass.model.fleet import FleetConfig
from windlass.model.lease import Candidate
from windlass.model.machine import Machine, MachineRequest, MachineState, ProviderTraits
from windlass.model.task import new_task

TOKEN = hash_of("token")


class RecordingProvider:
    def __init__(self, *, is_remote: bool) -> None:
        self.traits = ProviderTraits(is_remote=is_remote)
        self.requests: list[MachineRequest] = []

    async def create(self, request: MachineRequest) -> Machine:
        self.requests.append(request)
        return Machine(f"m-{request.name}", request.name, MachineState.RUNNING)

    async def list_machines(self) -> tuple[Machine, ...]:
        return tuple(Machine(f"m-{r.name}", r.name, MachineState.RUNNING) for r in self.requests)

    async def delete(self, machine: Machine) -> None:
        self.requests = [request for request in self.requests if f"m-{request.name}" != machine.id]

    async def close(self) -> None: ...


async def spawn_workers(clock: Any, *, is_remote: bool) -> tuple[MemoryStores, list[MachineRequest]]:
    store, provider = MemoryStores(clock, None, Random(1)), RecordingProvider(is_remote=is_remote)  # noqa: S311
    config = FleetConfig(queues=("q",), handler="app:work", max_workers=2, spawn_timeout_s=50, policy="threshold")
    await store.enqueue_many(new_task("q") for _ in range(50))
    await FleetCycle("f", config, store, provider, Candidate("ann", 30.0), Random(7)).run()  # noqa: S311
    assert provider.requests
    return store, provider.requests


async def test_each_remote_machine_gets_its_own_join_token(clock: Any) -> None:
    store, requests = await spawn_workers(clock, is_remote=True)
    tokens = [request.join_token or "" for request in requests]
    assert all(is_token(token, JOIN_PREFIX) for token in tokens)
    assert len(set(tokens)) == len(tokens)
    for request, token in zip(requests, tokens, strict=True):
        assert await store.activate(request.name, hash_of(token), hash_of(request.name)) is Activation.ACTIVATED


async def test_join_token_expires_after_spawn_timeout(clock: Any) -> None:
    store, (request, *_) = await spawn_workers(clock, is_remote=True)
    clock.advance(2 * 50 + CALL_TIMEOUT_S)
    assert await store.activate(request.name, hash_of(request.join_token or ""), TOKEN) is Activation.EXPIRED


async def test_join_token_is_never_stored_or_shown(clock: Any) -> None:
    store, (request, *_) = await spawn_workers(clock, is_remote=True)
    shown = [repr(request), repr(await store.events()), repr(await store.workers()), repr(await store.cycles("f"))]
    shown.append(repr(store.tables.workers.rows))
    shown.append(json.dumps([cycle.summary for cycle in await store.cycles("f")]))
    assert request.join_token
    assert not [text for text in shown if request.join_token in text]


async def test_local_machine_gets_no_join_token(clock: Any) -> None:
    store, requests = await spawn_workers(clock, is_remote=False)
    assert [request.join_token for request in requests] == [None] * len(requests)
    assert await store.activate(requests[0].name, TOKEN, TOKEN) is Activation.UNKNOWN


async def test_same_seed_gives_same_tokens(clock: Any) -> None:
    _, first = await spawn_workers(clock, is_remote=True)
    _, second = await spawn_workers(clock, is_remote=True)
    assert first == second
