"""Which nodes get tasks, whether a task fits on them, and what is reported to the database."""

from support.ray_builders import make_node, table_of_external, table_of_spawned
from windlass.model.ray import RaySettings, TaskNeeds, frozen
from windlass.ray.capacity import NodeCapacity
from windlass.ray.cluster import to_label_value
from windlass.ray.node_table import AVOIDED_S, UNUSABLE_S, NodeTable, Schedulability

ONE_CPU = frozen({"CPU": 1.0})


def test_schedulability_on_spawned_nodes() -> None:
    nodes = table_of_spawned("n1")
    assert nodes.schedulability(ONE_CPU) is Schedulability.FITS
    assert nodes.schedulability(frozen({"CPU": 8.0})) is Schedulability.NEVER
    assert nodes.schedulability(frozen({"disk": 1.0})) is Schedulability.NEVER
    # The memory of nodes is not set, so a larger node may come.
    assert nodes.schedulability(frozen({"CPU": 1.0, "memory": 2.0**40})) is Schedulability.NOT_NOW
    nodes.bar_workers(["n1"])
    assert nodes.schedulability(ONE_CPU) is Schedulability.NOT_NOW


def test_external_cluster_may_grow() -> None:
    nodes = table_of_external(make_node("id-1"))
    assert nodes.schedulability(frozen({"CPU": 8.0})) is Schedulability.MAY_FIT_AFTER_GROWTH
    assert table_of_external().schedulability(ONE_CPU) is Schedulability.MAY_FIT_AFTER_GROWTH
    # A paused node may be resumed, so the task is released and not held for growth.
    nodes.bar_workers(["ray-many-id-1"])
    assert nodes.schedulability(ONE_CPU) is Schedulability.NOT_NOW


def test_unusable_node_gets_no_tasks_for_a_while() -> None:
    clock = [0.0]
    nodes = table_of_spawned("n1", "n2", clock=clock)
    assert nodes.mark_unusable("id-n1", "no handler there")
    assert not nodes.mark_unusable("id-n1", "no handler there")
    assert (nodes.excluded_nodes(ONE_CPU), nodes.open_nodes().keys()) == ({"id-n1"}, {"id-n2"})
    assert nodes.schedulability(ONE_CPU) is Schedulability.FITS
    nodes.mark_unusable("id-n2", "no handler there either")
    assert nodes.schedulability(ONE_CPU) is Schedulability.NO_USABLE_NODE
    clock[0] = UNUSABLE_S + 1
    nodes.update(nodes.alive.values(), {})
    assert nodes.schedulability(ONE_CPU) is Schedulability.FITS


def test_node_rejected_by_the_database_is_avoided_for_a_moment() -> None:
    clock = [0.0]
    nodes = table_of_spawned("n1", "n2", clock=clock)
    nodes.avoid("id-n1")
    assert (nodes.excluded_nodes(ONE_CPU), nodes.open_nodes().keys()) == ({"id-n1"}, {"id-n2"})
    assert [nodes.open_worker_id(node_id) for node_id in ("id-n1", "id-n2", "id-unseen")] == [None, "n2", None]
    nodes.avoid("id-n2")
    assert nodes.schedulability(ONE_CPU) is Schedulability.NOT_NOW
    clock[0] = AVOIDED_S + 1
    nodes.update(nodes.alive.values(), {})
    assert nodes.schedulability(ONE_CPU) is Schedulability.FITS


def test_lost_node_stays_excluded_and_a_terminated_one_does_not() -> None:
    nodes = table_of_spawned("n1", "n2", "n3")
    nodes.bar_workers(["n3"])
    n1, n2, n3 = nodes.alive.values()
    assert not nodes.update([n1, n2, n3], {})
    assert not nodes.update([n1, n2], {})
    assert nodes.update([n2], {})
    assert nodes.excluded_nodes(ONE_CPU) == {"id-n1"}
    assert not nodes.update([n2], {})


def test_external_nodes_are_reported_if_they_fit_tasks_of_any_queue() -> None:
    settings = RaySettings(num_gpus=1, queues={"q": TaskNeeds(num_cpus=1)})
    nodes = table_of_external(
        make_node("id-1", cpus=3.0), make_node("id-head", cpus=0.0), settings=settings, queues=("q", "g")
    )
    assert [(node.worker_id, node.slots) for node in nodes.report()] == [("ray-many-id-1", 3)]
    assert nodes.open_worker_id("id-1") == "ray-many-id-1"
    assert nodes.open_worker_id("id-head") is None
    # A task without needs would fit on the head, so Ray must exclude it. Other tasks do not fit there.
    assert (nodes.excluded_nodes(frozen({})), nodes.excluded_nodes(ONE_CPU)) == ({"id-head"}, set())


def test_nodes_that_cannot_hold_a_task_are_not_listed_as_excluded() -> None:
    """Every seat carries the list, and an external cluster may have thousands of nodes."""
    gpu, settings = frozen({"CPU": 1.0, "GPU": 1.0}), RaySettings(num_gpus=1)
    external = [make_node(f"id-{number}") for number in range(1000)]
    ours = make_node("id-gpu", gpus=1.0)
    nodes = table_of_external(*external, ours, settings=settings)
    assert nodes.excluded_nodes(gpu) == set()
    nodes.mark_unusable("id-gpu", "no handler there")
    assert nodes.excluded_nodes(gpu) == {"id-gpu"}
    nodes.update(external, {})
    assert nodes.excluded_nodes(gpu) == {"id-gpu"}  # lost, but Ray may still try to reach it
    assert len(nodes.excluded_nodes(ONE_CPU)) == 1001


def test_usage_by_others_is_the_minimum_of_recent_observations() -> None:
    nodes = table_of_external(make_node("id-1", used=2.0))
    assert nodes.open_nodes() == {"id-1": NodeCapacity({"CPU": 2.0}, {"CPU": 2.0})}
    nodes.update([make_node("id-1", used=1.0)], {"id-1": {"CPU": 1.0}})
    nodes.update([make_node("id-1", used=2.0)], {})
    assert nodes.open_nodes()["id-1"].used_by_others == {"CPU": 0.0}


def test_fleets_that_share_a_cluster_have_separate_workers_per_node() -> None:
    """Otherwise a take-over of one fleet would requeue tasks of the other."""
    external, spawned_by_a = make_node("f" * 56), make_node("e" * 56, worker_id="a-1", fleet="a")
    seen: dict[str, list[tuple[str, bool]]] = {}
    for fleet in ("a", "b", "x" * 63):
        nodes = NodeTable(fleet, RaySettings(), ("q",), None)
        nodes.update([external, spawned_by_a], {})
        seen[fleet] = [(node.worker_id, getattr(node, "is_managed", False)) for node in nodes.report()]
        assert [nodes.open_worker_id(one.node_id) for one in (external, spawned_by_a)] == [
            name for name, _ in seen[fleet]
        ]
    assert seen["a"] == [(f"ray-a-{'f' * 16}", False), ("a-1", True)]
    assert seen["b"] == [(f"ray-b-{'f' * 16}", False), (f"ray-b-{'e' * 16}", False)]
    # Worker ids are labels in Ray.
    assert all(to_label_value(name) == name for names in seen.values() for name, _ in names)
