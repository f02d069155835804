"""The resources that tasks need, and those that ray-local nodes offer."""

from dataclasses import replace

import pytest

from support.ray_builders import make_claim
from windlass.model.errors import BadInput
from windlass.model.fleet import FleetConfig
from windlass.model.ray import RaySettings, TaskNeeds
from windlass.ray.capacity import count_fitting
from windlass.ray.resources import resolve_needs


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
        "the default is one CPU",
        "the settings of the queue",
        "the payload overrides the queue",
        "no resources",
        "null means the default",
        "the key inside a string is ignored",
        "a list has no keys",
    ],
)
def test_task_needs_come_from_payload_queue_or_default(payload: object, queue: str, needs: dict[str, float]) -> None:
    big = TaskNeeds(num_cpus=4, num_gpus=0.5, memory_mb=1024, resources={"disk": 1})
    assert resolve_needs(make_claim(payload, queue), RaySettings(queues={"big": big})) == needs


@pytest.mark.parametrize(
    "needs",
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
def test_invalid_needs_in_a_payload_are_rejected(needs: object) -> None:
    with pytest.raises(BadInput, match=r"invalid ray_resources.* in the task's payload: "):
        resolve_needs(make_claim({"ray_resources": needs}), RaySettings())


@pytest.mark.parametrize("odd", ["[" * 3_000 + "]" * 3_000, "9" * 5_000], ids=["nested deeply", "a long number"])
def test_needs_in_a_payload_that_python_cannot_parse_are_rejected(odd: str) -> None:
    with pytest.raises(BadInput, match="cannot read ray_resources: cannot parse the payload"):
        resolve_needs(replace(make_claim(), payload=f'{{"ray_resources": {{}}, "odd": {odd}}}'), RaySettings())


def test_queues_with_equal_needs_form_one_kind() -> None:
    settings = RaySettings(queues={"b": TaskNeeds(num_gpus=1), "c": TaskNeeds(num_cpus=1)})
    assert [*settings.classes(("a", "b", "c")).values()] == [("a", "c"), ("b",)]


def test_ray_local_nodes_offer_enough_for_the_largest_tasks_of_any_queue() -> None:
    renders = TaskNeeds(num_cpus=4, num_gpus=0.5, resources={"disk": 1})
    settings = RaySettings(queues={"renders": renders})
    offered = settings.offered(("renders", "thumbnails"), 3)
    assert (offered.node_cpus, offered.node_gpus, offered.node_resources) == (12, 2, {"disk": 3})
    total = {"CPU": offered.node_cpus or 0, "GPU": offered.node_gpus or 0, **offered.node_resources}
    assert count_fitting(total, renders.as_resources()) == 3
    # Explicit settings override computed ones. A queue that is not served needs nothing.
    explicit = settings.model_copy(update={"node_cpus": 5, "node_gpus": 1, "node_resources": {"disk": 9, "x": 1}})
    offered = explicit.offered(("renders",), 3)
    assert (offered.node_cpus, offered.node_gpus, offered.node_resources) == (5, 1, {"disk": 9, "x": 1})
    assert settings.offered(("thumbnails",), 3).node_gpus == 0


def test_node_offer_of_a_fleet_depends_on_its_provider() -> None:
    fleet = {"provider": "ray-local", "engine": "ray", "queues": ["q"], "concurrency": 2, "handler": "app:f"}
    large = FleetConfig.model_validate({**fleet, "ray": {"queues": {"q": {"num_cpus": 4}}}}).node_offer
    assert large is not None and (large.node_cpus, large.node_gpus) == (8, 0)
    small = FleetConfig.model_validate(fleet).node_offer
    assert small is not None and small.node_cpus == 2.0
    assert FleetConfig.model_validate({**fleet, "provider": "ray"}).node_offer is None
