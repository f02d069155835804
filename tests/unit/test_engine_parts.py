"""The pure parts of the engine: what tasks need, how many may be claimed, which versions work together."""

import asyncio
import json
from collections import Counter
from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.engine.cluster import label_value
from windlass.engine.gate import Gate
from windlass.engine.needs import needs_of
from windlass.engine.room import Flight, NodeRoom, capacity, free_places, places
from windlass.engine.versions import Versions, check_node_image, check_versions
from windlass.model.errors import BadInput, ConfigError
from windlass.model.ray import RaySettings, TaskNeeds, frozen
from windlass.model.task import Claim

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


@pytest.mark.parametrize("own", [{"num_cpus": -1}, {"cpus": 1}, {"resources": {"CPU": 1}}, "much", 4])
def test_a_task_that_asks_for_what_is_no_amount_is_told_so(own: object) -> None:
    with pytest.raises(BadInput, match="the task's ray_resources.* cannot be used"):
        needs_of(claim({"ray_resources": own}), RaySettings())


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
    nodes = {"a": NodeRoom({"CPU": 4.0}, {"CPU": 1.0}), "b": NodeRoom({"CPU": 2.0})}
    assert free_places(nodes, {}, CPU, margin=2) == 5 + 2
    flights = {Flight(frozen(CPU), "a"): 2, Flight(frozen(CPU)): 2}
    assert free_places(nodes, flights, CPU, margin=2) == 1 + 2


def test_those_that_wait_beyond_what_fits_use_up_the_margin() -> None:
    nodes = {"a": NodeRoom({"CPU": 1.0})}
    assert [free_places(nodes, {Flight(frozen(CPU)): count}, CPU, margin=2) for count in range(5)] == [3, 2, 1, 0, 0]


def test_without_a_node_that_could_hold_one_nothing_is_claimed() -> None:
    assert free_places({}, {}, CPU, margin=5) == 0
    assert free_places({"a": NodeRoom({"CPU": 4.0})}, {}, {"GPU": 1.0}, margin=5) == 0
    # One that is full is another matter: its place becomes free.
    assert free_places({"a": NodeRoom(CPU, CPU)}, {}, CPU, margin=5) == 5


def test_tasks_that_fit_nowhere_take_no_room_from_others() -> None:
    nodes = {"a": NodeRoom({"CPU": 2.0})}
    misfits = {Flight(frozen({"CPU": 8.0})): 12}
    assert free_places(nodes, misfits, CPU, margin=2) == free_places(nodes, {}, CPU, margin=2) == 4


def test_of_a_cluster_that_may_grow_as_many_as_the_margin_wait_for_a_node() -> None:
    waiting = [{Flight(frozen(CPU)): count} for count in range(4)]
    assert [free_places({}, flights, CPU, margin=2, is_awaited=True) for flights in waiting] == [2, 1, 0, 0]
    assert free_places({}, {}, CPU, margin=0, is_awaited=True) == 1
    # Full is not awaited: its places become free.
    full = {"a": NodeRoom(CPU, CPU)}
    assert free_places(full, {}, CPU, margin=2, is_awaited=False) == 2


@pytest.mark.parametrize("needs", [{}, {"disk": 0.001}], ids=["nothing", "hardly anything"])
def test_of_tasks_that_need_no_processor_a_node_takes_a_limited_number(needs: dict[str, float]) -> None:
    nodes = {"a": NodeRoom({"CPU": 2.0, "disk": 10.0}), "b": NodeRoom({"CPU": 2.0, "disk": 10.0})}
    flights: Counter[Flight] = Counter()
    for number in range(1000):
        if not free_places(nodes, flights, needs, margin=3):
            break
        flights[Flight(frozen(needs), ("a", "b", None)[number % 3])] += 1
    assert flights.total() == 2 * 100 + 3
    # They are in nobody's way who needs one.
    assert free_places(nodes, flights, CPU, margin=0) == 4 - 3


def test_a_task_on_a_node_that_is_gone_takes_no_place() -> None:
    assert free_places({"a": NodeRoom(CPU)}, {Flight(frozen(CPU), "gone"): 1}, CPU, margin=0) == 1


@given(
    cpus=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    needs=st.lists(st.sampled_from([0.5, 1.0, 2.0]), max_size=40),
    margin=st.integers(0, 5),
)
def test_never_more_is_held_than_fits_and_the_margin(cpus: list[int], needs: list[float], margin: int) -> None:
    """Claiming one by one, as long as there is a place: whatever they need, the count stays within the bound."""
    nodes = {str(number): NodeRoom({"CPU": float(count)}) for number, count in enumerate(cpus)}
    flights: Counter[Flight] = Counter()
    for need in needs:
        if free_places(nodes, flights, {"CPU": need}, margin):
            flights[Flight(frozen({"CPU": need}))] += 1
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


# -------------------------------------------------------------------------------------------------------- gate


async def test_the_gate_asks_for_each_start_and_passes_progress_on() -> None:
    known, told = uuid4(), []

    async def may_start(token: UUID, node_id: str) -> bool:
        return token == known and node_id == "n"

    gate = Gate(may_start, lambda *progress: told.append(progress))
    host, port = await gate.open("127.0.0.1")
    try:
        reader, writer = await asyncio.open_connection(host, port)
        lines = [{"start": str(known), "node": "n"}, {"start": str(uuid4()), "node": "n"}]
        lines += [{"progress": str(known), "fraction": 0.5, "note": "half"}, {"start": str(known), "node": "other"}]
        writer.writelines(json.dumps(line).encode() + b"\n" for line in lines)
        answers = [json.loads(await reader.readline()) for _ in range(3)]
        assert answers == [{"go": True}, {"go": False}, {"go": False}]
        assert told == [(known, 0.5, "half")]
        # Whoever talks nonsense is hung up on, and nobody else notices.
        _, stranger = await asyncio.open_connection(host, port)
        stranger.write(b"GET / HTTP/1.1\r\n\r\n")
        writer.write(json.dumps(lines[0]).encode() + b"\n")
        assert json.loads(await reader.readline()) == {"go": True}
        stranger.close()
        writer.close()
    finally:
        await gate.close()
