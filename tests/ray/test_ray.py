"""Tasks through a real Ray: a head for all, for each test its own nodes, dispatchers and database."""

import asyncio
import contextlib
import gzip
import json
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from support.postgres_servers import Server
from support.ray_fixture import WAIT_S, Bed, head_beside, made_bed, until
from windlass.model.errors import DatabaseUnavailable
from windlass.model.task import TaskStatus, new_task
from windlass.model.worker import WorkerKind, WorkerStatus
from windlass.ray.dispatcher import RENEWALS_PER_LEASE
from windlass.ray.head import HeadAddress
from windlass.ray.versions import our_versions

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module")
def head() -> Iterator[HeadAddress]:
    with head_beside() as head:
        yield head


@pytest.fixture
async def bed(head: HeadAddress, dsn: str, tmp_path: Path) -> AsyncIterator[Bed]:
    async with made_bed(head, dsn, tmp_path) as made:
        yield made


async def test_tasks_behave_as_with_workers_that_claim(bed: Bed, tmp_path: Path) -> None:
    """Attribution, progress, results, retries, dead letters, time limits, cancelling, Ray within Ray: one cluster."""
    await bed.hire("n1", "n2")
    bed.dispatch()
    await bed.joined("n1", "n2")
    gate = tmp_path / "gate"
    held = await bed.add(new_task("q", {"do": "progress", "until": str(gate)}))
    endless = await bed.add(new_task("q", {"s": 60}))
    wanted = {
        "plain": new_task("q", {}),
        "async": new_task("q", {"do": "async"}),
        "nested": new_task("q", {"do": "nested"}),
        "fails": new_task("q", {"do": "fail"}, max_attempts=1),
        "never": new_task("q", {"do": "never"}),
        "dies": new_task("q", {"do": "die"}, max_attempts=1),
        "late": new_task("q", {"s": 60}, timeout_s=0.5, max_attempts=1),
        "misfit": new_task("q", {"ray_resources": {"num_cpus": -1}}),
        "too large": new_task("q", {"ray_resources": {"num_cpus": 8}}),
        "small": new_task("q", {"ray_resources": {"num_cpus": 0.5}}),
    }
    ids = {name: await bed.add(task) for name, task in wanted.items()}

    async def is_half_way() -> Any:
        task = await bed.store.task(held)
        return task if task is not None and task.progress == 0.5 else None

    task = await until(is_half_way, "progress")
    assert (task.worker_id in ("n1", "n2"), task.progress_note) == (True, "half way")
    worker = await bed.store.worker(task.worker_id)
    assert worker is not None and worker.kind is WorkerKind.NODE and worker.first_claimed_at is not None
    gate.touch()
    await until(lambda: _has_begun(bed, endless), "the endless one's beginning")
    assert await bed.store.cancel_task(endless, "not wanted")
    found = dict(zip(ids, await bed.finished([*ids.values()]), strict=True))
    assert {name: task.status for name, task in found.items() if task.status is TaskStatus.COMPLETE} == dict.fromkeys(
        ("plain", "async", "nested", "small"), TaskStatus.COMPLETE
    )
    assert (json.loads(found["async"].result), json.loads(found["nested"].result)) == ("awaited", 14)
    codes = {name: task.error_code for name, task in found.items() if task.status is TaskStatus.FAILED}
    assert codes == {
        "fails": "HANDLER_ERROR",
        "never": "DO_NOT_RETRY",
        "dies": "CHILD_DIED",
        "late": "TIMEOUT",
        "misfit": "BAD_RESOURCES",
        "too large": "BAD_RESOURCES",
    }
    assert "on purpose" in found["fails"].error
    assert found["never"].attempts == 1
    # Who has run it is in its row; those that could run nowhere stayed the dispatcher's.
    ran = {task.worker_id for name, task in found.items() if name not in ("misfit", "too large")}
    assert ran <= {"n1", "n2"}
    assert Path(json.loads(found["plain"].result)["cwd"]) == Path(__file__).parent
    (first,) = await bed.finished([held])
    assert first.status is TaskStatus.COMPLETE
    # An actor keeps its model for all of them.
    asked = [json.loads(task.result) for task in await bed.finished(await bed.enqueue(6, do="actor", name=bed.fleet))]
    assert len({pid for pid, _ in asked}) == 1
    assert sorted(count for _, count in asked) == [1, 2, 3, 4, 5, 6]
    # The process of the cancelled one was ended: its place is free again for as many as the cluster holds.
    more = await bed.finished(await bed.enqueue(4, s=0.1))
    assert all(task.status is TaskStatus.COMPLETE for task in more)


async def _has_begun(bed: Bed, task_id: int) -> bool:
    task = await bed.store.task(task_id)
    return task is not None and task.worker_id in ("n1", "n2")


async def test_small_tasks_share_a_seat_and_a_process_that_dies_costs_the_one_that_ran(bed: Bed) -> None:
    """Many in one of Ray's tasks, one that kills the process in the middle, and results longer than a line."""
    await bed.hire("n1", cpus=1)
    ids = await bed.enqueue(20, do="seat")
    deadly = await bed.add(new_task("q", {"do": "die"}, max_attempts=1))
    ids += await bed.enqueue(20, do="seat")
    large = await bed.add(new_task("q", {"do": "large", "size": 500_000}))
    bed.dispatch()
    tasks = await bed.finished([*ids, deadly, large])
    assert {(task.status, task.attempts) for task in tasks if task.id != deadly} == {(TaskStatus.COMPLETE, 1)}
    (dead,) = [task for task in tasks if task.id == deadly]
    assert (dead.status, dead.error_code, dead.worker_id) == (TaskStatus.FAILED, "CHILD_DIED", "n1")
    assert json.loads(tasks[-1].result) == "x" * 500_000
    seats = Counter(json.loads(task.result) for task in tasks if task.id in ids)
    # One for those before it and one for those after it, or some more where the machine is slow.
    assert 2 <= len(seats) <= len(ids) / 2


async def test_never_more_is_claimed_than_ray_can_hold_and_the_margin(bed: Bed) -> None:
    bed.settings["ray.margin"] = 1
    await bed.hire("n1", "n2", cpus=2)
    ids = await bed.enqueue(40, s=0.15)
    dispatcher = bed.dispatch()
    held: list[int] = []

    async def are_complete() -> bool:
        held.append(len(await bed.store.tasks(status=TaskStatus.RUNNING, limit=1000)))
        return len(await bed.store.tasks(status=TaskStatus.COMPLETE, limit=1000)) == len(ids)

    await until(are_complete, "all tasks")
    assert max(held) == 2 * 2 + 1
    assert dispatcher.poll() is None
    by = Counter(task.worker_id for task in await bed.finished(ids))
    assert set(by) == {"n1", "n2"}


async def test_queues_that_need_different_things_share_what_there_is(bed: Bed) -> None:
    """Three classes of tasks, two places and no margin: never do more run than two, and each gets its turn."""
    queues = ("q", "r", "t")
    bed.settings.update({"queues": queues, "ray.margin": 0, "ray.queues.r.memory_mb": 1, "ray.queues.t.memory_mb": 2})
    await bed.hire("n1", cpus=2)
    ids = {queue: [await bed.add(new_task(queue, {"s": 0.2})) for _ in range(8)] for queue in queues}
    bed.dispatch()
    held: list[int] = []
    order: list[str] = []

    async def are_complete() -> bool:
        held.append(len(await bed.store.tasks(status=TaskStatus.RUNNING, limit=1000)))
        done = {task.id for task in await bed.store.tasks(status=TaskStatus.COMPLETE, limit=1000)}
        order.extend(queue for queue in queues if queue not in order and done.issuperset(ids[queue]))
        return len(order) == len(queues)

    await until(are_complete, "all tasks")
    # Beside those that have a place, those that had it and are being written down as finished.
    assert 2 <= max(held) <= 2 + 2
    # No queue had to wait for the end of another.
    tasks = [task for queue in queues for task in await bed.finished(ids[queue])]
    first_end = min(max(task.finished_at for task in tasks if task.queue == queue) for queue in queues)
    assert all(min(task.finished_at for task in tasks if task.queue == queue) < first_end for queue in queues)


async def test_a_node_killed_in_the_middle_costs_time_and_nothing_else(bed: Bed, tmp_path: Path) -> None:
    await bed.hire("n1", "n2")
    bed.dispatch()
    await bed.joined("n1", "n2")
    ids = await bed.enqueue(8, s=1.5, mark=str(tmp_path / "begun"))
    await until(lambda: bed.running_on("n1"), "tasks on n1")
    bed.raylet_of("n1").kill()
    tasks = await bed.finished(ids)

    async def is_known_to_be_lost() -> bool:
        """By Ray's word, or by its silence: whichever comes first."""
        worker = await bed.store.worker("n1")
        assert worker is not None
        return worker.status is WorkerStatus.ERROR or "n1" in await bed.nodes("dead")

    await until(is_known_to_be_lost, "the end of n1")
    assert {task.status for task in tasks} == {TaskStatus.COMPLETE}
    again = [task for task in tasks if task.attempts == 2]
    assert again and all(task.worker_id == "n2" for task in again)
    # None was begun twice, and none that does not count; one that was placed may have been killed before it began.
    begun = (tmp_path / "begun").read_text().split("\n")[:-1]
    attempts = sum(task.attempts for task in tasks)
    assert len(set(begun)) == len(begun)
    assert attempts - len(again) <= len(begun) <= attempts
    assert bed.processes["n1"].wait(10) == 2, bed.log("n1")
    assert bed.log("n1").strip().rpartition("\n")[2].startswith("windlass: the Ray node ended by itself")


@pytest.mark.timeout(240)
async def test_a_node_that_is_cut_off_for_longer_than_ray_waits_is_given_up_and_nothing_counts_twice(
    bed: Bed, tmp_path: Path
) -> None:
    await bed.hire("n1", "n2")
    bed.dispatch()
    await bed.joined("n1", "n2")
    ids = await bed.enqueue(8, s=1.0, mark=str(tmp_path / "begun"))
    await until(lambda: bed.running_on("n1"), "tasks on n1")
    raylet = bed.raylet_of("n1")
    stopped = [raylet, *raylet.children(recursive=True)]
    try:
        for process in stopped:
            process.suspend()
        held = {task.id for task in await bed.running_on("n1")}
        tasks = await bed.finished(ids, 2 * WAIT_S)
    finally:
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
    assert {task.status for task in tasks} == {TaskStatus.COMPLETE}
    again = {task.id: task.worker_id for task in tasks if task.attempts == 2}
    assert held and again == dict.fromkeys(held, "n2")
    # What it still has to say comes too late, it hears that it was given up, and makes room for another.
    assert await asyncio.to_thread(bed.processes["n1"].wait, 30) == 2, bed.log("n1")
    after = await bed.finished(ids)
    assert [(task.result, task.attempts, task.worker_id) for task in after] == [
        (task.result, task.attempts, task.worker_id) for task in tasks
    ]
    # None was begun twice, and none that does not count; one that was placed may have been stopped before it began.
    begun = (tmp_path / "begun").read_text().split()
    tokens, attempts = begun[1::2], sum(task.attempts for task in tasks)
    assert len(set(tokens)) == len(tokens)
    assert attempts - len(held) <= len(tokens) <= attempts
    assert "n1" in await bed.nodes("dead")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "cut off for a while"])
async def test_a_dispatcher_that_is_gone_is_replaced_by_the_one_that_stands_by(
    bed: Bed, number: signal.Signals
) -> None:
    await bed.hire("n1", "n2")
    bed.dispatch("first")
    await bed.joined("n1", "n2")
    bed.dispatch("second")

    async def stands_by() -> bool:
        return "standing by" in bed.log("second")

    await until(stands_by, "the second one's standing by")
    ids = await bed.enqueue(12, s=0.5)
    held = await until(lambda: bed.running_on("n1", "n2"), "tasks on nodes")
    first = bed.processes["first"]
    first.send_signal(number)
    tasks = await bed.finished(ids)
    assert {task.status for task in tasks} == {TaskStatus.COMPLETE}
    assert Counter(task.attempts for task in tasks)[2] >= 1
    lost = {task.id for task in tasks if task.attempts == 2}
    assert {task.id for task in held} & lost
    reasons = [
        event.detail["error_code"] for id_ in lost for event in await bed.store.events(task_id=id_) if event.detail
    ]
    assert set(reasons) == {"DISPATCHER_LOST"}
    if number is signal.SIGSTOP:
        # What it still has to say comes too late, and it hears so.
        first.send_signal(signal.SIGCONT)
        assert await asyncio.to_thread(first.wait, 30) == 3, bed.log("first")
        again = await bed.finished(ids)
        assert [(task.result, task.attempts) for task in again] == [(task.result, task.attempts) for task in tasks]
    dispatchers = [w for w in await bed.store.workers(include_terminated=True) if w.kind is WorkerKind.DISPATCHER]
    assert sorted(worker.status for worker in dispatchers) == [WorkerStatus.ACTIVE, WorkerStatus.TERMINATED]


async def test_a_database_that_is_away_for_longer_than_the_lease_costs_what_runs_nothing(
    bed: Bed, embedded_server: Server, tmp_path: Path
) -> None:
    await bed.hire("n1")
    dispatcher, gate = bed.dispatch(), tmp_path / "gate"
    held = await bed.add(new_task("q", {"do": "progress", "until": str(gate)}))
    await until(lambda: bed.running_on("n1"), "its beginning")
    await asyncio.to_thread(embedded_server.crash)
    try:

        async def is_long_away() -> bool:
            return bed.log("dispatcher").count("lease not renewed") > RENEWALS_PER_LEASE

        await until(is_long_away, "the end of the lease")
    finally:
        await asyncio.to_thread(embedded_server.start)
    gate.touch()
    await until(lambda: _answers(bed), "the database's answer")
    (task,) = await bed.finished([held])
    assert (task.status, task.attempts) == (TaskStatus.COMPLETE, 1)
    (after,) = await bed.finished(await bed.enqueue(1))
    assert (after.status, dispatcher.poll()) == (TaskStatus.COMPLETE, None)


async def _answers(bed: Bed) -> bool:
    with contextlib.suppress(DatabaseUnavailable):
        await bed.store.workers()
        return True
    return False


async def test_a_worker_that_is_to_end_gets_no_more_finishes_and_ends(bed: Bed) -> None:
    await bed.hire("n1", "n2")
    bed.dispatch()
    await bed.joined("n1", "n2")
    ids = await bed.enqueue(30, s=0.3)
    await until(lambda: bed.running_on("n1"), "tasks on n1")
    await bed.store.set_terminating(["n1"], "let go")
    told_at = await bed.store.now()
    tasks = await bed.finished(ids)
    assert {(task.status, task.attempts) for task in tasks} == {(TaskStatus.COMPLETE, 1)}
    mine = [task for task in tasks if task.worker_id == "n1"]
    assert mine and all(task.started_at is not None and task.started_at <= told_at for task in mine)
    assert len(tasks) - len(mine) > 20
    # Ray ended the empty node, and its worker left in good order.
    assert await asyncio.to_thread(bed.processes["n1"].wait, 15) == 0, bed.log("n1")
    worker = await bed.store.worker("n1")
    assert worker is not None and worker.status is WorkerStatus.TERMINATING


async def test_tasks_of_a_cluster_that_is_not_ours_belong_to_its_nodes(bed: Bed) -> None:
    """`provider = "ray"`: nobody is hired, and its nodes are told of as they are."""
    await bed.hire("n1")
    bed.settings["provider"] = "ray"
    dispatcher = bed.dispatch()
    # Amounts that no larger node would make Ray accept.
    refused = [
        await bed.add(new_task("q", {"ray_resources": amounts}))
        for amounts in ({"resources": {"TPU": 3}}, {"resources": {"neuron_cores": 0.5}}, {"num_gpus": 1.5})
    ]
    (task, *others) = await bed.finished([*await bed.enqueue(1), *refused])
    assert (task.status, task.worker_id) == (TaskStatus.COMPLETE, "n1")
    assert {(other.status, other.error_code) for other in others} == {(TaskStatus.FAILED, "BAD_RESOURCES")}
    assert dispatcher.poll() is None
    workers = await bed.store.workers()
    assert {worker.id for worker in workers if worker.kind is WorkerKind.NODE} == {"n1"}  # the head can hold none


async def test_a_cluster_of_others_grows_by_what_waits_and_nodes_that_lack_our_program_are_passed_over(
    bed: Bed, head: HeadAddress, tmp_path: Path
) -> None:
    """Nodes without our labels; the fleet's usual tasks need what none has, those of its queue `q` do not."""
    from windlass.ray.cluster import Cluster

    own = f"of-{bed.fleet}"
    bed.settings.update({"provider": "ray", "queues": ["q", "g"], "ray.num_gpus": 1, "ray.margin": 2})
    bed.settings[f"ray.queues.q.resources.{own}"] = 1
    dispatcher = bed.dispatch()
    ids = await bed.enqueue(6, s=0.3)
    cluster = Cluster(head.address)

    async def is_demanded() -> bool:
        return await asyncio.to_thread(_is_demanded, cluster, own)

    await until(is_demanded, "demand in Ray")
    assert len(await bed.store.tasks(status=TaskStatus.RUNNING, limit=100)) == 2
    bed.join("good", {own: 1})

    async def has_begun() -> bool:
        return bool(await bed.store.tasks(status=TaskStatus.COMPLETE, limit=1))

    await until(has_begun, "the first end")
    broken = tmp_path / "broken" / "windlass"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('not installed here')")
    bed.join("bare", {own: 4}, PYTHONPATH=str(broken.parent))

    async def are_both_there() -> bool:
        return len(await bed.nodes("alive")) == 2

    await until(are_both_there, "the bare node's joining")

    async def is_passed_over() -> bool:
        """Its process takes a while to start; the good one would have done what waits by then."""
        if not await bed.store.tasks(status=TaskStatus.QUEUED, limit=1):
            ids.extend(await bed.enqueue(8, s=0.3))
        return "windlass cannot be used on node" in bed.log("dispatcher")

    await until(is_passed_over, "the bare node's refusal")
    tasks = await bed.finished(ids)
    assert {(task.status, task.attempts) for task in tasks} == {(TaskStatus.COMPLETE, 1)}
    (worker_id,) = {task.worker_id for task in tasks}
    worker = await bed.store.worker(worker_id)
    assert worker is not None and worker.kind is WorkerKind.NODE and worker_id.startswith("ray-")
    assert dispatcher.poll() is None
    released = [event for id_ in ids for event in await bed.store.events(task_id=id_) if event.code == "TASK_RELEASED"]
    assert not released


def _is_demanded(cluster: Any, resource: str) -> bool:
    from ray.core.generated.autoscaler_pb2 import GetClusterResourceStateReply

    state = GetClusterResourceStateReply.FromString(cluster._gcs().get_cluster_resource_state(5.0))
    wanted = [one.request.resources_bundle for one in state.cluster_resource_state.pending_resource_requests]
    return any(resource in bundle for bundle in wanted)


class Traces:
    """Takes what OpenTelemetry is told."""

    def __init__(self) -> None:
        self.attempts: list[dict[str, int | str]] = []
        self.url = ""

    def take(self, body: bytes) -> None:
        sent = ExportTraceServiceRequest.FromString(body)
        spans = [span for r in sent.resource_spans for s in r.scope_spans for span in s.spans if span.name == "task"]
        for span in spans:
            told = {about.key: about.value.int_value or about.value.string_value for about in span.attributes}
            self.attempts.append(told)


@pytest.fixture
def traces() -> Iterator[Traces]:
    taken = Traces()

    class Taker(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            taken.take(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Taker) as server:
        taken.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield taken
        server.shutdown()
        thread.join()


async def test_a_command_is_run_told_to_telemetry_and_ends_with_its_attempt(
    bed: Bed, tmp_path: Path, traces: Traces
) -> None:
    script, pid_file = tmp_path / "command.sh", tmp_path / "pid"
    script.write_text(f"read task; case $task in *wait*) echo $$ > {pid_file}; exec sleep 60;; *) echo $task;; esac")
    bed.settings.update({"handler": None, "exec": f"sh {script}"})
    await bed.hire("n1")
    bed.dispatch(WINDLASS_LOGS__TRACES_ENDPOINT=traces.url)
    await bed.joined("n1")
    echoed = await bed.add(new_task("q", {"say": "hello"}, max_attempts=1))
    endless = await bed.add(new_task("q", {"say": "wait"}))
    (task,) = await bed.finished([echoed])
    assert (task.status, json.loads(task.result)) == (TaskStatus.COMPLETE, {"say": "hello"}), task.error

    async def pid() -> int | None:
        return int(pid_file.read_text()) if pid_file.exists() and pid_file.read_text() else None

    process = psutil.Process(await until(pid, "the command's start"))
    assert await bed.store.cancel_task(endless, "not wanted")
    await asyncio.to_thread(process.wait, 15)
    # A command that is nowhere is no task's fault: the dispatcher says so and ends.
    bed.processes["dispatcher"].terminate()
    await asyncio.to_thread(bed.processes["dispatcher"].wait, 30)
    about = {"windlass.task.id": echoed, "windlass.task.queue": "q", "windlass.task.attempt": 1}
    assert about in traces.attempts
    bed.settings["exec"] = "nowhere-to-be-found"
    refused = bed.dispatch("second")
    given_back = await bed.add(new_task("q", {}))
    assert await asyncio.to_thread(refused.wait, 30) == 2, bed.log("second")
    assert "cannot find the command 'nowhere-to-be-found'" in bed.log("second").strip().rpartition("\n")[2]
    task = await bed.store.task(given_back)
    assert (task.status, task.attempts) == (TaskStatus.QUEUED, 0)


@contextmanager
def head_that_says(head: HeadAddress, **versions: str) -> Iterator[None]:
    """A head of other versions, as far as anybody asks it."""
    from windlass.ray.cluster import Cluster

    gcs = Cluster(head.address)._gcs()
    key, space = b"CLUSTER_METADATA", b"cluster"
    truth = gcs.internal_kv_get(key, namespace=space)
    try:
        gcs.internal_kv_put(key, json.dumps({**json.loads(truth), **versions}).encode(), True, space)
        yield
    finally:
        gcs.internal_kv_put(key, truth, True, space)


async def test_nodes_and_dispatcher_join_a_head_whose_python_differs_in_the_patch(bed: Bed, head: HeadAddress) -> None:
    with head_that_says(head, python_version=f"{our_versions().python_minor}.99"):
        await bed.hire("n1")
        bed.dispatch()
        (task,) = await bed.finished(await bed.enqueue(1))
    assert (task.status, task.worker_id) == (TaskStatus.COMPLETE, "n1")


async def test_another_version_of_ray_is_refused_in_one_sentence(bed: Bed, head: HeadAddress) -> None:
    with head_that_says(head, ray_version="2.9.0"):
        refused = bed.dispatch()
        assert await asyncio.to_thread(refused.wait, 30) == 2
    said = bed.log("dispatcher").strip()
    assert said.count("\n") == 0
    assert said.startswith(f"windlass: the Ray head at {head.address} runs Ray 2.9.0 and here is Ray ")
    assert "pip install ray==2.9.0" in said
