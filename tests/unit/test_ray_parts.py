"""The pure parts of the engine: what tasks need, how many may be claimed, which versions work together."""

import asyncio
import contextlib
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.model.errors import BadInput, ConfigError
from windlass.model.node import NodeVerdict, Placement
from windlass.model.ray import RaySettings, TaskNeeds, frozen
from windlass.model.task import Claim
from windlass.ray import seat_process as seat
from windlass.ray import wire_protocol as line
from windlass.ray.capacity import InFlightKind, Needs, NodeCapacity, capacity, free_slots, places
from windlass.ray.cluster import label_value
from windlass.ray.placement_writer import Placer
from windlass.ray.resources import needs_of
from windlass.ray.seat_server import SeatServer
from windlass.ray.versions import Versions, check_node_image, check_versions
from windlass.ray.wait_list import WaitList
from windlass.simulator.loop import run
from windlass.worker.executor import AttemptFailure, AttemptSuccess, Outcome

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def claim(payload: object, queue: str = "q") -> Claim:
    return Claim(1, uuid4(), queue, json.dumps(payload), 1, 3, None, 0, NOW)


# ------------------------------------------------------------------------------------------------------- needs


@pytest.mark.parametrize(
    ("payload", "queue", "needs"),
    [
        ({}, "q", {"CPU": 1.0}),
        (None, "big", {"CPU": 4.0, "GPU": 0.5, "disk": 1.0, "memory": 2.0**30}),
        ({"ray_resources": {"num_cpus": 2}}, "big", {"CPU": 2.0}),
        ({"ray_resources": {"num_cpus": 0}}, "q", {}),
        ({"ray_resources": None}, "q", {"CPU": 1.0}),
        ({"text": 'the word "ray_resources"'}, "q", {"CPU": 1.0}),
        (["ray_resources"], "q", {"CPU": 1.0}),
    ],
    ids=[
        "by default one CPU",
        "its queue's",
        "its own word goes before its queue's",
        "nothing at all",
        "no word is none",
        "a word is not a key",
        "a list has no keys",
    ],
)
def test_what_a_task_needs(payload: object, queue: str, needs: dict[str, float]) -> None:
    big = TaskNeeds(num_cpus=4, num_gpus=0.5, memory_mb=1024, resources={"disk": 1})
    assert needs_of(claim(payload, queue), RaySettings(queues={"big": big})) == needs


@pytest.mark.parametrize(
    "own",
    [
        {"num_cpus": -1},
        {"num_cpus": float("inf")},
        {"num_gpus": 1.5},
        {"num_gpus": float("inf")},
        {"memory_mb": 10**400},
        {"cpus": 1},
        {"resources": {"CPU": 1}},
        {"resources": {"disk": float("inf")}},
        "much",
        4,
    ],
    ids=str,
)
def test_a_task_that_asks_for_what_is_no_amount_is_told_so(own: object) -> None:
    with pytest.raises(BadInput, match="the task's ray_resources.* cannot be used"):
        needs_of(claim({"ray_resources": own}), RaySettings())


@pytest.mark.parametrize("odd", ["[" * 3_000 + "]" * 3_000, "9" * 5_000], ids=["nested deeply", "a long number"])
def test_a_task_whose_payload_python_does_not_read_is_told_so(odd: str) -> None:
    with pytest.raises(BadInput, match="JSON that Python does not read"):
        needs_of(replace(claim(None), payload=f'{{"ray_resources": {{}}, "odd": {odd}}}'), RaySettings())


def test_queues_that_need_the_same_share_their_places() -> None:
    settings = RaySettings(queues={"b": TaskNeeds(num_gpus=1), "c": TaskNeeds(num_cpus=1)})
    assert [*settings.classes(("a", "b", "c")).values()] == [("a", "c"), ("b",)]


def test_nodes_of_one_host_offer_room_for_the_largest_tasks_of_any_queue() -> None:
    renders = TaskNeeds(num_cpus=4, num_gpus=0.5, resources={"disk": 1})
    settings = RaySettings(queues={"renders": renders})
    offered = settings.offered(("renders", "thumbnails"), 3)
    assert (offered.node_cpus, offered.node_gpus, offered.node_resources) == (12, 2, {"disk": 3})
    total = {"CPU": offered.node_cpus or 0, "GPU": offered.node_gpus or 0, **offered.node_resources}
    assert places(total, renders.as_resources()) == 3
    # What is said goes before what is found out; a queue that is not served asks for nothing.
    told = settings.model_copy(update={"node_cpus": 5, "node_gpus": 1, "node_resources": {"disk": 9, "x": 1}})
    offered = told.offered(("renders",), 3)
    assert (offered.node_cpus, offered.node_gpus, offered.node_resources) == (5, 1, {"disk": 9, "x": 1})
    assert settings.offered(("thumbnails",), 3).node_gpus == 0


# -------------------------------------------------------------------------------------------------------- room

CPU = {"CPU": 1.0}


@pytest.mark.parametrize(
    ("free", "needs", "count"),
    [
        ({"CPU": 4.0}, CPU, 4),
        ({"CPU": 4.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 0.5}, 2),
        ({"CPU": 4.0}, {"CPU": 1.0, "GPU": 1.0}, 0),
        ({"CPU": 0.3}, {"CPU": 0.1}, 3),
        ({"CPU": -1.0}, CPU, 0),
        ({}, {}, 100),
    ],
    ids=["whole", "the scarcest decides", "what is not there", "decimal fractions", "overdrawn", "nothing needed"],
)
def test_how_many_fit(free: dict[str, float], needs: dict[str, float], count: int) -> None:
    assert places(free, needs) == count


def test_others_and_our_own_tasks_take_their_places_and_the_margin_is_added() -> None:
    nodes = {"a": NodeCapacity({"CPU": 4.0}, {"CPU": 1.0}), "b": NodeCapacity({"CPU": 2.0})}
    assert free_slots(nodes, {}, CPU, margin=2) == 5 + 2
    flights = {InFlightKind(frozen(CPU), "a"): 2, InFlightKind(frozen(CPU)): 2}
    assert free_slots(nodes, flights, CPU, margin=2) == 1 + 2


def test_those_that_wait_beyond_what_fits_use_up_the_margin() -> None:
    nodes = {"a": NodeCapacity({"CPU": 1.0})}
    assert [free_slots(nodes, {InFlightKind(frozen(CPU)): count}, CPU, margin=2) for count in range(5)] == [
        3,
        2,
        1,
        0,
        0,
    ]


def test_without_a_node_that_could_hold_one_nothing_is_claimed() -> None:
    assert free_slots({}, {}, CPU, margin=5) == 0
    assert free_slots({"a": NodeCapacity({"CPU": 4.0})}, {}, {"GPU": 1.0}, margin=5) == 0
    # One that is full is another matter: its place becomes free.
    assert free_slots({"a": NodeCapacity(CPU, CPU)}, {}, CPU, margin=5) == 5


def test_tasks_that_fit_nowhere_take_no_room_from_others() -> None:
    nodes = {"a": NodeCapacity({"CPU": 2.0})}
    misfits = {InFlightKind(frozen({"CPU": 8.0})): 12}
    assert free_slots(nodes, misfits, CPU, margin=2) == free_slots(nodes, {}, CPU, margin=2) == 4


def test_of_a_cluster_that_may_grow_as_many_as_the_margin_wait_for_a_node() -> None:
    waiting = [{InFlightKind(frozen(CPU)): count} for count in range(4)]
    assert [free_slots({}, flights, CPU, margin=2, is_awaited=True) for flights in waiting] == [2, 1, 0, 0]
    assert free_slots({}, {}, CPU, margin=0, is_awaited=True) == 1
    # It may never grow for others that wait, and for these it may.
    others = {InFlightKind(frozen({"CPU": 1e6})): 8, InFlightKind(frozen({"GPU": 1.0})): 1}
    assert free_slots({}, others, {"GPU": 1.0}, margin=8, is_awaited=True) == 7
    # Full is not awaited: its places become free.
    full = {"a": NodeCapacity(CPU, CPU)}
    assert free_slots(full, {}, CPU, margin=2, is_awaited=False) == 2


@pytest.mark.parametrize("needs", [{}, {"disk": 0.001}], ids=["nothing", "hardly anything"])
def test_of_tasks_that_need_no_processor_a_node_takes_a_limited_number(needs: dict[str, float]) -> None:
    nodes = {"a": NodeCapacity({"CPU": 2.0, "disk": 10.0}), "b": NodeCapacity({"CPU": 2.0, "disk": 10.0})}
    flights: Counter[InFlightKind] = Counter()
    for number in range(1000):
        if not free_slots(nodes, flights, needs, margin=3):
            break
        flights[InFlightKind(frozen(needs), ("a", "b", None)[number % 3])] += 1
    assert flights.total() == 2 * 100 + 3
    # They are in nobody's way who needs one.
    assert free_slots(nodes, flights, CPU, margin=0) == 4 - 3


def test_a_task_on_a_node_that_is_gone_takes_no_place() -> None:
    assert free_slots({"a": NodeCapacity(CPU)}, {InFlightKind(frozen(CPU), "gone"): 1}, CPU, margin=0) == 1


@given(
    cpus=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    needs=st.lists(st.sampled_from([0.5, 1.0, 2.0]), max_size=40),
    margin=st.integers(0, 5),
)
def test_never_more_is_held_than_fits_and_the_margin(cpus: list[int], needs: list[float], margin: int) -> None:
    """Claiming one by one, as long as there is a place: whatever they need, the count stays within the bound."""
    nodes = {str(number): NodeCapacity({"CPU": float(count)}) for number, count in enumerate(cpus)}
    flights: Counter[InFlightKind] = Counter()
    for need in needs:
        if free_slots(nodes, flights, {"CPU": need}, margin):
            flights[InFlightKind(frozen({"CPU": need}))] += 1
    assert flights.total() <= capacity(nodes, {"CPU": 0.5}) + margin


# ------------------------------------------------------------------------------------------- versions and labels


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (Versions("2.9.0", "3.11.4"), "the head runs Ray 2.9.0 and here is Ray 2.60.0.*pip install ray==2.9.0 here"),
        (Versions("2.60.0", "3.12.1"), "the head runs Python 3.12.1 and here is Python 3.11.7.*with Python 3.12"),
    ],
)
def test_versions_that_differ_are_refused_with_what_to_do(there: Versions, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_versions(Versions("2.60.0", "3.11.7"), there, "the head")


def test_the_last_part_of_pythons_version_does_not_matter() -> None:
    check_versions(Versions("2.60.0", "3.11.7"), Versions("2.60.0", "3.11.9"), "the head")


def test_an_image_with_another_python_is_refused_before_anything_is_hired() -> None:
    ours = Versions("2.60.0", "3.11.7")
    check_node_image(ours, "debian-12", "many")
    check_node_image(ours, "my-own-image", "many")
    with pytest.raises(
        ConfigError, match=r"ubuntu-24.04, which has Python 3.12.*fleets.many.hetzner.image to debian-12"
    ):
        check_node_image(ours, "ubuntu-24.04", "many")
    # With a Python that windlass itself cannot run on, only another image helps.
    with pytest.raises(ConfigError, match=r"Python 3.10, .*: set fleets.many.hetzner.image to debian-12\.$"):
        check_node_image(ours, "ubuntu-22.04", "many")
    with pytest.raises(ConfigError, match=r"choose an image that has Python 3.15\.$"):
        check_node_image(Versions("2.60.0", "3.15.0"), "ubuntu-22.04", "many")


def test_names_of_fleets_become_labels_that_ray_accepts_and_that_differ() -> None:
    assert label_value("gpu-fleet.1") == "gpu-fleet.1"
    labels = {label_value("a:b"), label_value("a-b"), label_value("a:b:"), label_value("x" * 63)}
    assert len(labels) == 4
    assert all(":" not in label and len(label) <= 63 for label in labels)


# ------------------------------------------------------------------------------------------- who waits, which seats

ONE, TWO = frozen(CPU), frozen({"CPU": 2.0})


def test_the_oldest_of_a_kind_is_next_and_one_that_comes_back_is_before_it() -> None:
    roster: WaitList[str, int] = WaitList()
    for attempt in ("a", "b", "c", "d"):
        roster.wait(ONE, attempt)
    roster.wait(TWO, "large")
    assert roster.take(ONE) == "a"
    roster.leave(ONE, "c")
    roster.leave(ONE, "nobody")
    roster.wait_again(ONE, "a")
    assert [roster.take(ONE) for _ in range(4)] == ["a", "b", "d", None]
    assert roster.kinds() == [TWO]
    assert (roster.take_all(TWO), roster.take_all(TWO), roster.kinds()) == (["large"], [], [])


@pytest.mark.parametrize(
    ("waiting", "seats", "missing", "surplus"),
    [
        (0, [], 0, []),
        (3, [], 3, []),
        (3, [1, 2], 1, []),
        (2, [1, 2], 0, []),
        (1, [1, 2, 3], 0, [2, 3]),
        (0, [1, 2], 0, [1, 2]),
    ],
    ids=[
        "nobody, nothing",
        "a seat for each",
        "one more",
        "as many as wait",
        "the youngest are too many",
        "all are too many",
    ],
)
def test_ray_has_a_seat_for_each_that_waits(waiting: int, seats: list[int], missing: int, surplus: list[int]) -> None:
    roster: WaitList[int, int] = WaitList()
    for attempt in range(waiting):
        roster.wait(ONE, attempt)
    for each in seats:
        roster.submitted(ONE, each)
    # Those of another kind are another matter.
    roster.wait(TWO, 100)
    roster.submitted(TWO, 100)
    assert (roster.missing(ONE), roster.surplus()) == (missing, surplus)


@given(st.lists(st.tuples(st.sampled_from(["wait", "start", "serve", "again", "leave", "look"]), st.booleans())))
def test_whatever_happens_seats_are_not_too_few_and_after_a_look_not_too_many(steps: list[tuple[str, bool]]) -> None:
    roster: WaitList[int, int] = WaitList()
    waiting: dict[Needs, list[int]] = {ONE: [], TWO: []}
    for number, (step, is_large) in enumerate(steps):
        kind = TWO if is_large else ONE
        unstarted = list(roster.unstarted())
        if step == "wait":
            roster.wait(kind, number)
            waiting[kind].append(number)
        elif step == "again":
            roster.wait_again(kind, number)
            waiting[kind].insert(0, number)
        elif step == "leave" and waiting[kind]:
            roster.leave(kind, waiting[kind].pop())
        elif step == "start" and unstarted:
            roster.started(kind, unstarted[0])
        elif step == "serve":
            assert roster.take(kind) == (waiting[kind].pop(0) if waiting[kind] else None)
        for each in waiting:
            for count in range(roster.missing(each)):
                roster.submitted(each, 1000 * (number + 1) + 100 * is_large + count)
            assert not roster.missing(each)
        if step == "look":
            for extra in roster.surplus():
                for each in waiting:
                    roster.started(each, extra)
            assert len(list(roster.unstarted())) == sum(map(len, waiting.values()))
    assert set(roster.kinds()) == {kind for kind, queue in waiting.items() if queue}


# ------------------------------------------------------------------------------------------------ line and gate


@pytest.mark.parametrize(
    "outcome",
    [
        AttemptSuccess(None),
        AttemptSuccess("null"),
        AttemptSuccess('{"say": "Gr\u00fc\u00dfe"}'),
        AttemptFailure("TIMEOUT", "too\nlate"),
        AttemptFailure("X", "", retry=False),
    ],
)
def test_an_outcome_is_read_as_it_was_said(outcome: Outcome) -> None:
    said, _, body = line.done("s", uuid4(), outcome).partition(b"\n")
    header = json.loads(said)
    size = line.size_of(header, 100)
    assert size == (None if outcome == AttemptSuccess(None) else len(body))
    assert line.read_outcome(header, None if size is None else body) == outcome


def test_orders_are_read_as_they_were_given_and_words_of_errors_have_an_end() -> None:
    one = claim({"text": "\n" * 10})
    said, _, body = line.orders(one).partition(b"\n")
    assert line.read_orders(json.loads(said), body) == one
    assert line.read_orders(json.loads(line.orders(None)), None) is None
    said, _, body = line.done("s", uuid4(), AttemptFailure("X", "\u00e9" * line.MAX_WORDS_BYTES)).partition(b"\n")
    assert len(body) == line.MAX_WORDS_BYTES
    assert line.read_outcome(json.loads(said), body).error.startswith("\u00e9")  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [11, -1, "10", 1.5])
def test_nobody_announces_more_than_the_limit(size: object) -> None:
    with pytest.raises(ValueError, match="10 are the limit"):
        line.size_of({"size": size}, 10)


class SeatCallbacks:
    """Has some claims for the seat `s`."""

    def __init__(self, *claims: Claim) -> None:
        self.claims = list(claims)
        self.told: list[Any] = []

    def knows(self, seat_id: str) -> bool:
        return seat_id == "s"

    def loading(self, *loading: str) -> None:
        self.told.append(loading)

    async def arrive(self, seat_id: str, node_id: str, hang_up: Callable[[], None]) -> Claim | None:
        self.hang_up = hang_up
        return self.claims.pop(0) if (seat_id, node_id) == ("s", "n") else None

    async def finish(self, seat_id: str, token: UUID, outcome: Outcome) -> Claim | None:
        self.told.append((seat_id, token, outcome))
        return self.claims.pop(0) if self.claims else None

    def progress(self, *progress: Any) -> None:
        self.told.append(progress)


async def test_the_gate_gives_a_seat_what_there_is_and_takes_large_results() -> None:
    first, second = claim({}), claim("x" * line.MAX_LINE_BYTES)
    result = json.dumps("y" * 10 * line.MAX_LINE_BYTES)
    desk = SeatCallbacks(first, second)
    gate = SeatServer(desk, len(result))
    host, port = await gate.open("127.0.0.1")
    try:
        reader, writer = await asyncio.open_connection(host, port)

        async def orders() -> Claim | None:
            said = json.loads(await reader.readline())
            return line.read_orders(said, await reader.readexactly(said["size"]) if "size" in said else None)

        writer.write(line.arrival("stranger", "n"))
        assert await orders() is None
        writer.write(line.loading("s", "n") + line.arrival("s", "n"))
        assert await orders() == first
        writer.write(line.progress("s", first.token, 0.5, "half") + line.done("s", first.token, AttemptSuccess(result)))
        assert await orders() == second
        # Whoever talks nonsense, or too much, is hung up on, and nobody else notices.
        for nonsense in (b"GET / HTTP/1.1\r\n\r\n", line.done("s", first.token, AttemptSuccess("9" * (1 << 20)))):
            ear, stranger = await asyncio.open_connection(host, port)
            stranger.write(nonsense)
            with contextlib.suppress(ConnectionResetError):
                assert await ear.read() == b""
            stranger.close()
        writer.write(line.done("s", second.token, AttemptFailure("X", "why")))
        assert await orders() is None
        assert desk.told == [
            ("s", "n"),
            ("s", first.token, 0.5, "half"),
            ("s", first.token, AttemptSuccess(result)),
            ("s", second.token, AttemptFailure("X", "why")),
        ]
        writer.close()
    finally:
        await gate.close()


async def test_strangers_at_the_gate_are_few_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.ray.seat_server.MAX_STRANGERS", 2)
    monkeypatch.setattr("windlass.ray.seat_server.STRANGER_S", 2.0)
    desk = SeatCallbacks(claim({}))
    gate = SeatServer(desk, 1 << 20)
    address = await gate.open("127.0.0.1")
    callers = [await asyncio.open_connection(*address)]
    (ours, writer), result = callers[0], AttemptSuccess("9" * (1 << 20))
    try:
        writer.write(line.arrival("s", "n"))
        await ours.readuntil(b"\n{}")
        callers += [await asyncio.open_connection(*address) for _ in range(5)]
        callers[1][1].write(line.done("x", uuid4(), result))
        assert json.loads(await callers[1][0].readline()) == {"run": None}
        # What never comes to its end is not waited for.
        callers[2][1].write(line.done("x", uuid4(), result)[:-1])
        for reader, _ in callers[1:]:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.write(line.progress("s", uuid4(), 0.5, None) + line.arrival("another", "n"))
        assert json.loads(await ours.readline()) == {"run": None}
    finally:
        for _, writer in callers:
            writer.close()
        await gate.close()


@pytest.mark.parametrize("is_at_work", [True, False], ids=["at work", "told to end"])
async def test_the_gate_hangs_up_on_a_seat_that_must_end_and_on_no_process_that_is_free(is_at_work: bool) -> None:
    one = claim({})
    desk = SeatCallbacks(one)
    gate = SeatServer(desk, 1000)
    reader, writer = await asyncio.open_connection(*await gate.open("127.0.0.1"))
    try:
        writer.write(line.arrival("s", "n"))
        await reader.readuntil(b"\n{}")
        if not is_at_work:
            writer.write(line.done("s", one.token, AttemptSuccess("1")))
            assert json.loads(await reader.readline()) == {"run": None}
        desk.hang_up()
        if is_at_work:
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 10) == b""
        else:
            # It may be another seat's by now.
            writer.write(line.arrival("another", "n"))
            assert json.loads(await reader.readline()) == {"run": None}
    finally:
        writer.close()
        await gate.close()


@pytest.mark.parametrize("end", [-1, -50, 30], ids=["at the payload's end", "in the payload", "in the line"])
def test_orders_that_were_cut_are_not_run_and_the_process_ends(monkeypatch: pytest.MonkeyPatch, end: int) -> None:
    orders, ended = line.orders(claim("x" * 100)), threading.Event()
    monkeypatch.setattr("windlass.ray.seat_process.os._exit", lambda _code: ended.set())
    with socket.create_server(("127.0.0.1", 0)) as server:
        its_end = seat._Line(server.getsockname())
        ours, _ = server.accept()
        with ours:
            ours.sendall(orders[:end])
        assert ended.wait(10)
        assert its_end._orders.empty()
        its_end.close()


def test_a_seat_that_has_to_load_the_handler_says_so_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seat, "_node_id", lambda: "n")
    monkeypatch.setattr(seat, "_handlers", {})
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as process:
        job = seat.Job(server.getsockname(), "json:dumps", None, 1000)
        try:
            for number, words in enumerate(
                [[line.loading("0", "n"), line.arrival("0", "n")], [line.arrival("1", "n")]]
            ):
                parting = process.submit(seat.run_seat, str(number), job)
                if not number:
                    ours, _ = server.accept()
                    said = ours.makefile("rb")
                assert [said.readline() for _ in words] == words
                ours.sendall(line.orders(None))
                assert parting.result(10) is None
        finally:
            seat._hang_up(job.gate)
        said.close()
        ours.close()


def test_a_payload_that_python_does_not_read_fails_its_attempt_alone() -> None:
    job = seat.Job(("127.0.0.1", 1), "json:dumps", None, 1000)
    unreadable = replace(claim({}), payload="[" * 200_000 + "]" * 200_000)
    outcome = seat._runner_of(job)(unreadable, lambda _fraction, _note: None)
    assert isinstance(outcome, AttemptFailure)
    assert (outcome.code, outcome.retry) == ("BAD_PAYLOAD", False)


# ----------------------------------------------------------------------------------------------------- placements


class Placements:
    """A database that fails on the first call, as one does that threw it out for a deadlock."""

    def __init__(self) -> None:
        self.calls: list[list[Placement]] = []

    async def place(self, placements: list[Placement]) -> dict[UUID, NodeVerdict]:
        self.calls.append(placements)
        if len(self.calls) == 1:
            raise RuntimeError("deadlock detected")
        return {placement.token: NodeVerdict.PLACED for placement in placements}


def test_placements_that_the_database_fails_to_write_are_written_at_the_next_try() -> None:
    async def place() -> None:
        database = Placements()
        placer = Placer(database)  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            answers = [placer.place(Placement(number, uuid4(), "n1")) for number in range(3)]
            assert await asyncio.gather(*answers) == 3 * [NodeVerdict.PLACED]
        assert [len(placements) for placements in database.calls] == [3, 3]
        await placer.close()

    run(place())
