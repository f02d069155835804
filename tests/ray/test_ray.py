"""Tasks on a real Ray cluster: one head for all tests, with nodes, dispatchers and a database per test."""

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
from support.ray_fixture import WAIT_S, RayFixture, head_in_thread, ray_fixture, until
from windlass.model.errors import DatabaseUnavailable
from windlass.model.task import TaskStatus, new_task
from windlass.model.worker import WorkerKind, WorkerStatus
from windlass.ray.cluster import Cluster
from windlass.ray.dispatcher_lease import LEASE_S, RENEWAL_INTERVAL_S
from windlass.ray.head import HeadAddress
from windlass.ray.versions import our_versions

# Several starts of nodes, one after another, on a busy machine.
pytestmark = [pytest.mark.ray, pytest.mark.timeout(480)]


@pytest.fixture(scope="module")
def head() -> Iterator[HeadAddress]:
    with head_in_thread() as head:
        yield head


@pytest.fixture
async def ray(head: HeadAddress, dsn: str, tmp_path: Path) -> AsyncIterator[RayFixture]:
    async with ray_fixture(head, dsn, tmp_path) as fixture:
        yield fixture


async def test_tasks_behave_as_on_other_workers(ray: RayFixture, tmp_path: Path) -> None:
    """Attribution, progress, results, failures, privacy, time limits, cancelling, and handlers that use Ray."""
    ray.settings["redact"] = ["$.prompt"]
    await ray.spawn_nodes("n1", "n2")
    ray.start_dispatcher()
    await ray.wait_for_nodes("n1", "n2")
    resume_file = tmp_path / "resume"
    held = await ray.add(new_task("q", {"do": "progress", "until": str(resume_file)}))
    endless = await ray.add(new_task("q", {"s": 60}))
    wanted = {
        "plain": new_task("q", {}),
        "async": new_task("q", {"do": "async"}),
        "nested": new_task("q", {"do": "nested"}),
        "fails": new_task("q", {"do": "fail"}, max_attempts=1),
        "quotes": new_task("q", {"do": "quote", "prompt": "a lighthouse"}, max_attempts=1),
        "never": new_task("q", {"do": "never"}),
        "dies": new_task("q", {"do": "die"}, max_attempts=1),
        "late": new_task("q", {"s": 60}, timeout_s=0.5, max_attempts=1),
        "misfit": new_task("q", {"ray_resources": {"num_cpus": -1}}),
        "too large": new_task("q", {"ray_resources": {"num_cpus": 8}}),
        "small": new_task("q", {"ray_resources": {"num_cpus": 0.5}}),
    }
    ids = {name: await ray.add(task) for name, task in wanted.items()}

    async def is_half_way() -> Any:
        task = await ray.store.task(held)
        return task if task is not None and task.progress == 0.5 else None

    task = await until(is_half_way, "progress")
    assert (task.worker_id in ("n1", "n2"), task.progress_note) == (True, "half way")
    worker = await ray.store.worker(task.worker_id)
    assert worker is not None and worker.kind is WorkerKind.NODE and worker.first_claimed_at is not None
    resume_file.touch()
    await until(lambda: _has_begun(ray, endless), "the endless task is running")
    assert await ray.store.cancel_task(endless, "not wanted")
    found = dict(zip(ids, await ray.wait_for_tasks([*ids.values()]), strict=True))
    assert {name: task.status for name, task in found.items() if task.status is TaskStatus.COMPLETE} == dict.fromkeys(
        ("plain", "async", "nested", "small"), TaskStatus.COMPLETE
    )
    assert (json.loads(found["async"].result), json.loads(found["nested"].result)) == ("awaited", 14)
    codes = {name: task.error_code for name, task in found.items() if task.status is TaskStatus.FAILED}
    assert codes == {
        "fails": "HANDLER_ERROR",
        "quotes": "HANDLER_ERROR",
        "never": "DO_NOT_RETRY",
        "dies": "CHILD_DIED",
        "late": "TIMEOUT",
        "misfit": "BAD_RESOURCES",
        "too large": "BAD_RESOURCES",
    }
    assert "on purpose" in found["fails"].error
    assert "cannot render" in found["quotes"].error and "lighthouse" not in found["quotes"].error
    assert found["never"].attempts == 1
    # Tasks that could run nowhere stayed with the dispatcher.
    ran = {task.worker_id for name, task in found.items() if name not in ("misfit", "too large")}
    assert ran <= {"n1", "n2"}
    assert Path(json.loads(found["plain"].result)["cwd"]) == Path(__file__).parent
    (first,) = await ray.wait_for_tasks([held])
    assert first.status is TaskStatus.COMPLETE
    # All six tasks used the same actor.
    asked = [
        json.loads(task.result) for task in await ray.wait_for_tasks(await ray.enqueue(6, do="actor", name=ray.fleet))
    ]
    assert len({pid for pid, _ in asked}) == 1
    assert sorted(count for _, count in asked) == [1, 2, 3, 4, 5, 6]
    # The process of the cancelled task was killed, so all slots of the cluster are free again.
    more = await ray.wait_for_tasks(await ray.enqueue(4, s=0.1))
    assert all(task.status is TaskStatus.COMPLETE for task in more)


async def test_output_of_tasks_on_nodes_is_stored_by_attempt(ray: RayFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a handler, its libraries and its processes print: under its node, masked and bounded."""
    monkeypatch.setenv("RENDER_API_KEY", "s3cret-of-the-node")
    ray.settings["redact"] = ["$.prompt"]
    await ray.spawn_nodes("n1")
    ray.start_dispatcher(WINDLASS_LOGS__OUTPUT_BYTES_PER_ATTEMPT="20000")
    retried = await ray.add(new_task("q", {"do": "print", "prompt": "a lighthouse", "succeeds_at": 2}))
    chatty = await ray.add(new_task("q", {"do": "print", "prompt": "a harbour", "lines": 5_000}))
    silent = await ray.add(new_task("q", {}))
    tasks = await ray.wait_for_tasks([retried, chatty, silent])
    assert [(task.status, task.attempts) for task in tasks] == [(TaskStatus.COMPLETE, n) for n in (2, 1, 1)]

    async def lines(task_id: int, attempt: int) -> list[str]:
        return [line.text for line in (await ray.store.task_log(task_id, 10_000, attempt=attempt)).lines]

    async def is_stored() -> bool:
        of_retried, of_chatty = await lines(retried, 2), await lines(chatty, 1)
        is_at_the_end = any(line.startswith("line 004999") for line in of_chatty)
        return is_at_the_end and "without a line feed" in of_retried and "without a line feed" in of_chatty

    await until(is_stored, "the output of all attempts")
    printed = {
        "to standard output: ********",
        "to standard error",
        "past Python's streams",
        "from a process: ********",
    }
    assert set(await lines(retried, 1)) == printed
    assert set(await lines(retried, 2)) == printed | {"without a line feed"}
    assert await lines(silent, 1) == []
    page = await ray.store.task_log(chatty, 10_000)
    kept = [line.text for line in page.lines if line.text.startswith("line ")]
    assert (kept[0][:11], kept[-1][:11]) == ("line 000000", "line 004999"), "the beginning and the end"
    assert len("\n".join(kept)) < 2 * 20_000
    assert sum(line.dropped or 1 for line in page.lines) == 5_000 + len(printed) + 1
    # The node's worker sends it as its output.
    on_node = (await ray.store.worker_log("n1", 10_000)).lines
    assert {line.task_id for line in on_node} >= {retried, chatty}
    assert any("registered node" in line.text for line in on_node if line.task_id is None)
    dispatchers = [worker.id for worker in await ray.store.workers() if worker.kind is WorkerKind.DISPATCHER]
    of_dispatcher = [line.text for each in dispatchers for line in (await ray.store.worker_log(each, 100)).lines]
    assert any("registered worker" in text for text in of_dispatcher)


async def _has_begun(ray: RayFixture, task_id: int) -> bool:
    task = await ray.store.task(task_id)
    return task is not None and task.worker_id in ("n1", "n2")


async def test_short_tasks_share_a_seat_and_a_dead_process_fails_one_attempt(ray: RayFixture) -> None:
    """One task in the middle kills the process. Results may be larger than a header."""
    await ray.spawn_nodes("n1", cpus=1)
    ids = await ray.enqueue(20, do="seat")
    deadly = await ray.add(new_task("q", {"do": "die"}, max_attempts=1))
    ids += await ray.enqueue(20, do="seat")
    large = await ray.add(new_task("q", {"do": "large", "size": 500_000}))
    ray.start_dispatcher()
    tasks = await ray.wait_for_tasks([*ids, deadly, large])
    assert {(task.status, task.attempts) for task in tasks if task.id != deadly} == {(TaskStatus.COMPLETE, 1)}
    (dead,) = [task for task in tasks if task.id == deadly]
    assert (dead.status, dead.error_code, dead.worker_id) == (TaskStatus.FAILED, "CHILD_DIED", "n1")
    assert json.loads(tasks[-1].result) == "x" * 500_000
    seats = Counter(json.loads(task.result) for task in tasks if task.id in ids)
    # One seat before the dead process and one after it, or some more on a slow machine.
    assert 2 <= len(seats) <= len(ids) / 2


async def test_claims_never_exceed_capacity_plus_margin(ray: RayFixture) -> None:
    ray.settings["ray.margin"] = 1
    await ray.spawn_nodes("n1", "n2", cpus=2)
    ids = await ray.enqueue(40, s=0.15)
    dispatcher = ray.start_dispatcher()
    held: list[int] = []

    async def are_complete() -> bool:
        held.append(len(await ray.store.tasks(status=TaskStatus.RUNNING, limit=1000)))
        return len(await ray.store.tasks(status=TaskStatus.COMPLETE, limit=1000)) == len(ids)

    await until(are_complete, "all tasks")
    assert max(held) == 2 * 2 + 1
    assert dispatcher.poll() is None
    by = Counter(task.worker_id for task in await ray.wait_for_tasks(ids))
    assert set(by) == {"n1", "n2"}


async def test_queues_with_different_needs_share_the_capacity(ray: RayFixture) -> None:
    """Three kinds of tasks, two slots and no margin: at most two tasks run, and each kind gets its turn."""
    queues = ("q", "r", "t")
    ray.settings.update({"queues": queues, "ray.margin": 0, "ray.queues.r.memory_mb": 1, "ray.queues.t.memory_mb": 2})
    await ray.spawn_nodes("n1", cpus=2)
    ids = {queue: [await ray.add(new_task(queue, {"s": 0.2})) for _ in range(8)] for queue in queues}
    ray.start_dispatcher()
    held: list[int] = []
    order: list[str] = []

    async def are_complete() -> bool:
        held.append(len(await ray.store.tasks(status=TaskStatus.RUNNING, limit=1000)))
        done = {task.id for task in await ray.store.tasks(status=TaskStatus.COMPLETE, limit=1000)}
        order.extend(queue for queue in queues if queue not in order and done.issuperset(ids[queue]))
        return len(order) == len(queues)

    await until(are_complete, "all tasks")
    # Two tasks run, and two more may have finished and not be recorded yet.
    assert 2 <= max(held) <= 2 + 2
    # No queue waited until another was empty.
    tasks = [task for queue in queues for task in await ray.wait_for_tasks(ids[queue])]
    first_end = min(max(task.finished_at for task in tasks if task.queue == queue) for queue in queues)
    assert all(min(task.finished_at for task in tasks if task.queue == queue) < first_end for queue in queues)


async def test_tasks_of_a_killed_node_are_retried_on_another(ray: RayFixture, tmp_path: Path) -> None:
    await ray.spawn_nodes("n1", "n2")
    ray.start_dispatcher()
    await ray.wait_for_nodes("n1", "n2")
    ids = await ray.enqueue(8, s=1.5, mark=str(tmp_path / "begun"))
    await until(lambda: ray.running_on("n1"), "tasks on n1")
    ray.raylet_of("n1").kill()
    tasks = await ray.wait_for_tasks(ids)

    async def is_lost() -> bool:
        """Ray reports it dead, or its heartbeats stop: whichever is first."""
        worker = await ray.store.worker("n1")
        assert worker is not None
        return worker.status is WorkerStatus.ERROR or "n1" in await ray.nodes("dead")

    await until(is_lost, "n1 is lost")
    assert {task.status for task in tasks} == {TaskStatus.COMPLETE}
    again = [task for task in tasks if task.attempts == 2]
    assert again and all(task.worker_id == "n2" for task in again)
    # No attempt began twice. One that was placed may have been killed before its handler began.
    begun = (tmp_path / "begun").read_text().split("\n")[:-1]
    attempts = sum(task.attempts for task in tasks)
    assert len(set(begun)) == len(begun)
    assert attempts - len(again) <= len(begun) <= attempts
    assert ray.processes["n1"].wait(10) == 2, ray.log("n1")
    assert ray.log("n1").strip().rpartition("\n")[2].startswith("windlass: the Ray node exited unexpectedly")


async def test_tasks_of_a_suspended_node_run_elsewhere_and_count_once(ray: RayFixture, tmp_path: Path) -> None:
    await ray.spawn_nodes("n1", "n2")
    ray.start_dispatcher()
    await ray.wait_for_nodes("n1", "n2")
    ids = await ray.enqueue(8, s=1.0, mark=str(tmp_path / "begun"))
    await until(lambda: ray.running_on("n1"), "tasks on n1")
    raylet = ray.raylet_of("n1")
    stopped = [raylet, *raylet.children(recursive=True)]
    try:
        for process in stopped:
            process.suspend()
        held = {task.id for task in await ray.running_on("n1")}
        tasks = await ray.wait_for_tasks(ids, 2 * WAIT_S)
    finally:
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
    assert {task.status for task in tasks} == {TaskStatus.COMPLETE}
    again = {task.id: task.worker_id for task in tasks if task.attempts == 2}
    assert held and again == dict.fromkeys(held, "n2")
    # After it resumes, its results are ignored, and it exits because Ray has declared it dead.
    assert await asyncio.to_thread(ray.processes["n1"].wait, 30) == 2, ray.log("n1")
    after = await ray.wait_for_tasks(ids)
    assert [(task.result, task.attempts, task.worker_id) for task in after] == [
        (task.result, task.attempts, task.worker_id) for task in tasks
    ]
    # No attempt began twice. One that was placed may have been suspended before its handler began.
    begun = (tmp_path / "begun").read_text().split()
    tokens, attempts = begun[1::2], sum(task.attempts for task in tasks)
    assert len(set(tokens)) == len(tokens)
    assert attempts - len(held) <= len(tokens) <= attempts
    assert "n1" in await ray.nodes("dead")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "suspended"])
async def test_standby_replaces_a_lost_dispatcher(ray: RayFixture, number: signal.Signals) -> None:
    await ray.spawn_nodes("n1", "n2")
    ray.start_dispatcher("first")
    await ray.wait_for_nodes("n1", "n2")
    ray.start_dispatcher("second")

    async def is_standby() -> bool:
        return "wait for dispatcher lease" in ray.log("second")

    await until(is_standby, "the second dispatcher is a standby")
    ids = await ray.enqueue(12, s=0.5)
    held = await until(lambda: ray.running_on("n1", "n2"), "tasks on nodes")
    first = ray.processes["first"]
    first.send_signal(number)
    tasks = await ray.wait_for_tasks(ids)
    assert {task.status for task in tasks} == {TaskStatus.COMPLETE}
    assert Counter(task.attempts for task in tasks)[2] >= 1
    lost = {task.id for task in tasks if task.attempts == 2}
    assert {task.id for task in held} & lost
    reasons = [
        event.detail["error_code"] for id_ in lost for event in await ray.store.events(task_id=id_) if event.detail
    ]
    # A node may notice the silent dispatcher before the standby takes over.
    assert set(reasons) <= {"DISPATCHER_LOST", "WORKER_LOST"}
    if number is signal.SIGSTOP:
        # After it resumes, its results are ignored, and it exits because it lost the lease.
        first.send_signal(signal.SIGCONT)
        assert await asyncio.to_thread(first.wait, 30) == 3, ray.log("first")
        again = await ray.wait_for_tasks(ids)
        assert [(task.result, task.attempts) for task in again] == [(task.result, task.attempts) for task in tasks]
    dispatchers = [w for w in await ray.store.workers(include_terminated=True) if w.kind is WorkerKind.DISPATCHER]
    assert sorted(worker.status for worker in dispatchers) == [WorkerStatus.ACTIVE, WorkerStatus.TERMINATED]


async def test_running_tasks_survive_a_database_outage_longer_than_the_lease(
    ray: RayFixture, embedded_server: Server, tmp_path: Path
) -> None:
    await ray.spawn_nodes("n1")
    dispatcher, resume_file = ray.start_dispatcher(), tmp_path / "resume"
    held = await ray.add(new_task("q", {"do": "progress", "until": str(resume_file)}))
    await until(lambda: ray.running_on("n1"), "the task is running")
    await asyncio.to_thread(embedded_server.crash)
    try:

        async def has_lease_expired() -> bool:
            return ray.log("dispatcher").count("renew lease failed") > LEASE_S / RENEWAL_INTERVAL_S

        await until(has_lease_expired, "the lease has expired")
    finally:
        await asyncio.to_thread(embedded_server.start)
    resume_file.touch()
    await until(lambda: _responds(ray), "the database responds")
    (task,) = await ray.wait_for_tasks([held])
    assert (task.status, task.attempts) == (TaskStatus.COMPLETE, 1)
    (after,) = await ray.wait_for_tasks(await ray.enqueue(1))
    assert (after.status, dispatcher.poll()) == (TaskStatus.COMPLETE, None)


async def _responds(ray: RayFixture) -> bool:
    with contextlib.suppress(DatabaseUnavailable):
        await ray.store.workers()
        return True
    return False


async def test_terminating_worker_finishes_its_tasks_and_exits(ray: RayFixture) -> None:
    await ray.spawn_nodes("n1", "n2")
    ray.start_dispatcher()
    await ray.wait_for_nodes("n1", "n2")
    ids = await ray.enqueue(30, s=0.3)
    await until(lambda: ray.running_on("n1"), "tasks on n1")
    await ray.store.set_terminating(["n1"], "drained by a test")
    drained_at = await ray.store.now()
    tasks = await ray.wait_for_tasks(ids)
    assert {(task.status, task.attempts) for task in tasks} == {(TaskStatus.COMPLETE, 1)}
    mine = [task for task in tasks if task.worker_id == "n1"]
    assert mine and all(task.started_at is not None and task.started_at <= drained_at for task in mine)
    assert len(tasks) - len(mine) > 20
    # Ray ended the empty node, and the node program exited with success.
    assert await asyncio.to_thread(ray.processes["n1"].wait, 15) == 0, ray.log("n1")
    worker = await ray.store.worker("n1")
    assert worker is not None and worker.status is WorkerStatus.TERMINATING


async def test_tasks_of_an_external_cluster_belong_to_its_nodes(ray: RayFixture) -> None:
    """With provider = "ray" no node is spawned, and those of the cluster are reported as they are."""
    await ray.spawn_nodes("n1")
    ray.settings["provider"] = "ray"
    dispatcher = ray.start_dispatcher()
    # Amounts that Ray rejects on nodes of any size.
    refused = [
        await ray.add(new_task("q", {"ray_resources": amounts}))
        for amounts in ({"resources": {"TPU": 3}}, {"resources": {"neuron_cores": 0.5}}, {"num_gpus": 1.5})
    ]
    (task, *others) = await ray.wait_for_tasks([*await ray.enqueue(1), *refused])
    assert (task.status, task.worker_id) == (TaskStatus.COMPLETE, "n1")
    assert {(other.status, other.error_code) for other in others} == {(TaskStatus.FAILED, "BAD_RESOURCES")}
    assert dispatcher.poll() is None
    workers = await ray.store.workers()
    assert {worker.id for worker in workers if worker.kind is WorkerKind.NODE} == {"n1"}  # the head can hold no task


async def test_external_cluster_sees_demand_and_nodes_without_windlass_get_no_tasks(
    ray: RayFixture, head: HeadAddress, tmp_path: Path
) -> None:
    """Nodes without our labels. Default tasks of the fleet fit on none of them, those of its queue `q` do."""
    own = f"of-{ray.fleet}"
    ray.settings.update({"provider": "ray", "queues": ["q", "g"], "ray.num_gpus": 1, "ray.margin": 2})
    ray.settings[f"ray.queues.q.resources.{own}"] = 1
    dispatcher = ray.start_dispatcher()
    ids = await ray.enqueue(6, s=0.3)
    cluster = Cluster(head.address)

    async def has_demand() -> bool:
        return await asyncio.to_thread(_has_demand, cluster, own)

    await until(has_demand, "Ray sees the demand")
    assert len(await ray.store.tasks(status=TaskStatus.RUNNING, limit=100)) == 2
    ray.start_external_node("good", {own: 1})

    async def has_begun() -> bool:
        return bool(await ray.store.tasks(status=TaskStatus.COMPLETE, limit=1))

    await until(has_begun, "the first task is complete")
    broken = tmp_path / "broken" / "windlass"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('not installed here')")
    ray.start_external_node("bare", {own: 4}, PYTHONPATH=str(broken.parent))

    async def are_both_alive() -> bool:
        return len(await ray.nodes("alive")) == 2

    await until(are_both_alive, "the bare node is alive")

    async def is_unusable() -> bool:
        """Its process takes a while to start, in which the good node may empty the queue."""
        if not await ray.store.tasks(status=TaskStatus.QUEUED, limit=1):
            ids.extend(await ray.enqueue(8, s=0.3))
        return "cannot import windlass on node" in ray.log("dispatcher")

    await until(is_unusable, "the bare node is unusable")
    tasks = await ray.wait_for_tasks(ids)
    assert {(task.status, task.attempts) for task in tasks} == {(TaskStatus.COMPLETE, 1)}
    (worker_id,) = {task.worker_id for task in tasks}
    worker = await ray.store.worker(worker_id)
    assert worker is not None and worker.kind is WorkerKind.NODE and worker_id.startswith("ray-")
    assert dispatcher.poll() is None
    released = [event for id_ in ids for event in await ray.store.events(task_id=id_) if event.code == "TASK_RELEASED"]
    assert not released


def _has_demand(cluster: Any, resource: str) -> bool:
    from ray.core.generated.autoscaler_pb2 import GetClusterResourceStateReply

    state = GetClusterResourceStateReply.FromString(cluster.connect().get_cluster_resource_state(5.0))
    wanted = [one.request.resources_bundle for one in state.cluster_resource_state.pending_resource_requests]
    return any(resource in bundle for bundle in wanted)


class TraceCollector:
    """Records the attributes of attempts that were exported to OpenTelemetry."""

    def __init__(self) -> None:
        self.attempts: list[dict[str, int | str]] = []
        self.url = ""

    def record(self, body: bytes) -> None:
        sent = ExportTraceServiceRequest.FromString(body)
        spans = [span for r in sent.resource_spans for s in r.scope_spans for span in s.spans if span.name == "task"]
        for span in spans:
            attributes = span.attributes
            self.attempts.append({a.key: a.value.int_value or a.value.string_value for a in attributes})


@pytest.fixture
def traces() -> Iterator[TraceCollector]:
    collector = TraceCollector()

    class CollectorHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.record(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), CollectorHandler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield collector
        server.shutdown()
        thread.join()


async def test_command_is_traced_and_ends_with_its_attempt(
    ray: RayFixture, tmp_path: Path, traces: TraceCollector
) -> None:
    script, pid_file = tmp_path / "command.sh", tmp_path / "pid"
    script.write_text(f"read task; case $task in *wait*) echo $$ > {pid_file}; exec sleep 60;; *) echo $task;; esac")
    ray.settings.update({"handler": None, "exec": f"sh {script}"})
    await ray.spawn_nodes("n1")
    ray.start_dispatcher(WINDLASS_LOGS__TRACES_ENDPOINT=traces.url)
    await ray.wait_for_nodes("n1")
    echoed = await ray.add(new_task("q", {"say": "hello"}, max_attempts=1))
    endless = await ray.add(new_task("q", {"say": "wait"}))
    (task,) = await ray.wait_for_tasks([echoed])
    assert (task.status, json.loads(task.result)) == (TaskStatus.COMPLETE, {"say": "hello"}), task.error

    async def pid() -> int | None:
        return int(pid_file.read_text()) if pid_file.exists() and pid_file.read_text() else None

    process = psutil.Process(await until(pid, "the command has started"))
    assert await ray.store.cancel_task(endless, "not wanted")
    await asyncio.to_thread(process.wait, 15)
    # A missing command fails no task: the dispatcher exits with an error.
    ray.processes["dispatcher"].terminate()
    await asyncio.to_thread(ray.processes["dispatcher"].wait, 30)
    about = {"windlass.task.id": echoed, "windlass.task.queue": "q", "windlass.task.attempt": 1}
    assert about in traces.attempts
    ray.settings["exec"] = "nowhere-to-be-found"
    refused = ray.start_dispatcher("second")
    released = await ray.add(new_task("q", {}))
    assert await asyncio.to_thread(refused.wait, 30) == 2, ray.log("second")
    assert "cannot find the command 'nowhere-to-be-found'" in ray.log("second").strip().rpartition("\n")[2]
    task = await ray.store.task(released)
    assert (task.status, task.attempts) == (TaskStatus.QUEUED, 0)


@contextmanager
def head_with_versions(head: HeadAddress, **versions: str) -> Iterator[None]:
    """The head reports other versions inside the context."""
    gcs = Cluster(head.address).connect()
    key, space = b"CLUSTER_METADATA", b"cluster"
    original = gcs.internal_kv_get(key, namespace=space)
    try:
        gcs.internal_kv_put(key, json.dumps({**json.loads(original), **versions}).encode(), True, space)
        yield
    finally:
        gcs.internal_kv_put(key, original, True, space)


async def test_nodes_and_dispatcher_join_a_head_with_another_python_patch(ray: RayFixture, head: HeadAddress) -> None:
    with head_with_versions(head, python_version=f"{our_versions().python_minor}.99"):
        await ray.spawn_nodes("n1")
        ray.start_dispatcher()
        (task,) = await ray.wait_for_tasks(await ray.enqueue(1))
    assert (task.status, task.worker_id) == (TaskStatus.COMPLETE, "n1")


async def test_dispatcher_refuses_a_head_with_another_ray_version(ray: RayFixture, head: HeadAddress) -> None:
    with head_with_versions(head, ray_version="2.9.0"):
        refused = ray.start_dispatcher()
        assert await asyncio.to_thread(refused.wait, 30) == 2
    error = ray.log("dispatcher").strip()
    assert error.count("\n") == 0
    assert error.startswith(f"windlass: Ray versions differ: the Ray head at {head.address} has 2.9.0, this host has ")
    assert "pip install ray==2.9.0" in error
