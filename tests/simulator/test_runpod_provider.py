"""The Runpod provider against the emulated API in virtual time: create, list and delete."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from support.runpod_fixture import GPU, OTHER_GPU, TOKEN, URL, EmulatedRunpod, request_for
from support.simulator.loop import run
from support.virtual_time import in_virtual_time
from windlass.model.errors import (
    Ambiguous,
    Denied,
    InvalidRequest,
    LimitReached,
    NoCapacity,
    Refused,
    Throttled,
    Unavailable,
)
from windlass.model.machine import Machine, MachineState
from windlass.model.worker_log import MAX_BOOT_LOG_CHARACTERS
from windlass.providers.fingerprint import fingerprint
from windlass.providers.runpod.catalog import DEFAULT_DISK_GB, disk_price
from windlass_emulators.runpod.errors import NO_CAPACITY

DISK = disk_price(DEFAULT_DISK_GB)


@pytest.mark.parametrize(("status", "detail"), [(403, "not in your plan"), (400, "this type is retired")])
def test_refused_choice_is_reported_although_another_succeeds(status: int, detail: str) -> None:
    @in_virtual_time
    async def scenario() -> None:
        cloud = EmulatedRunpod()
        provider = cloud.provider(choices=[GPU, OTHER_GPU])
        assert provider.traits.refused_choices == ()
        cloud.faults.next_create(status, detail=detail)
        assert (await provider.create(request_for())).instance_type == OTHER_GPU
        assert provider.traits.refused_choices == ((f"{GPU} in SECURE", f"{detail} ({status})"),)
        await asyncio.sleep(3500)
        assert provider.traits.refused_choices
        await provider.create(request_for(1))
        assert provider.traits.refused_choices == (), "the choice succeeded"

    scenario()


@in_virtual_time
async def test_created_pod_has_requested_properties_and_price() -> None:
    cloud = EmulatedRunpod(checks_contract=True)
    volume = cloud.client.post("/network-volumes", json={"name": "d", "size": 100, "dataCenter": "EU-RO-1"}).json()
    registry = cloud.client.post("/registries", json={"name": "r", "username": "u", "password": "p"}).json()
    provider = cloud.provider(
        choices=[f"{GPU}@SECURE/EU-RO-1/US-KS-2"], gpu_count=2, min_cuda_version="12.6", args="serve --fast",
        env={"MODEL": "large"}, ports=["8888/http"], disk_gb=40, network_volume_id=volume["id"], volume_path="/data",
        registry_id=registry["id"],
    )  # fmt: skip
    machine = await provider.create(request_for(slot=3))
    (pod,) = cloud.pods.values()
    assert (pod.name, pod.config.image, pod.config.args, pod.config.disk_gb) == (
        "red-3-aa", "example/worker:1", "serve --fast", 40,
    )  # fmt: skip
    assert pod.config.env == {
        "MODEL": "large",
        "WINDLASS_POD": f"{fingerprint('this')}/red/red-3-aa",
        "WINDLASS_JOIN": json.dumps({"worker_id": "red-3-aa", "url": URL, "join_token": TOKEN}),
    }
    assert pod.config.ports == ["8888/http"]
    assert (pod.config.registry, pod.mount.volume_id, pod.mount.path) == (registry["id"], volume["id"], "/data")
    assert (pod.gpu.id, pod.gpu_count, pod.cloud, pod.data_center.id) == (GPU, 2, "SECURE", "EU-RO-1")
    assert pod.cuda_version in ("12.6", "12.8", "13.0")
    assert machine == Machine(
        id=pod.id,
        name="red-3-aa",
        state=MachineState.BOOTING,
        created_at=pod.created,
        instance_type=GPU,
        place="EU-RO-1",
        price_micros_per_hour=1_380_000 + disk_price(40),
        currency="USD",
    )


@in_virtual_time
async def test_pod_is_created_from_a_template() -> None:
    cloud = EmulatedRunpod(checks_contract=True)
    template = {"name": "t", "image": "example/other:2", "env": {"A": "1"}, "disk": 30}
    made = cloud.client.post("/templates", json=template).json()
    await cloud.provider(template_id=made["id"], image=None).create(request_for())
    (pod,) = cloud.pods.values()
    assert (pod.config.image, pod.config.disk_gb, pod.config.env["A"]) == ("example/other:2", 30, "1")


@in_virtual_time
async def test_pod_to_prepare_gets_our_public_key() -> None:
    cloud = EmulatedRunpod(checks_contract=True)
    await cloud.provider(public_key="ssh-ed25519 OURS", env={"PUBLIC_KEY": "ssh-ed25519 MINE"}).create(request_for())
    (pod,) = cloud.pods.values()
    assert pod.config.env["PUBLIC_KEY"] == "ssh-ed25519 OURS\nssh-ed25519 MINE"
    assert pod.config.ports == ["22/tcp"]


@in_virtual_time
async def test_choice_without_capacity_is_skipped_and_remembered() -> None:
    cloud = EmulatedRunpod()
    cloud.faults.no_capacity(GPU, "SECURE", is_announced=False)
    provider = cloud.provider(choices=[GPU, f"{GPU}@COMMUNITY", OTHER_GPU])
    first = await provider.create(request_for(0))
    assert (first.instance_type, first.price_micros_per_hour) == (GPU, 340_000 + DISK)
    assert len(cloud.sent("POST", "/pods")) == 2
    await provider.create(request_for(1))
    assert len(cloud.sent("POST", "/pods")) == 3
    cloud.faults.clear()
    await asyncio.sleep(300)
    assert (await provider.create(request_for(2))).price_micros_per_hour == 690_000 + DISK


@in_virtual_time
async def test_no_request_is_sent_while_all_choices_lack_capacity() -> None:
    cloud = EmulatedRunpod()
    cloud.faults.no_capacity(is_announced=False)
    provider = cloud.provider(choices=[f"{GPU}@SECURE/EU-RO-1", OTHER_GPU])
    message = f"creating pod red-0-aa: no capacity for {GPU} in SECURE/EU-RO-1, {OTHER_GPU} in SECURE. Wait, or add"
    with pytest.raises(NoCapacity, match=message):
        await provider.create(request_for())
    sent = len(cloud.sent("POST"))
    with pytest.raises(NoCapacity):
        await provider.create(request_for())
    assert len(cloud.sent("POST")) == sent == 2


@in_virtual_time
async def test_out_of_stock_choice_is_tried_last() -> None:
    cloud = EmulatedRunpod()
    cloud.faults.no_capacity(GPU, "SECURE", "EU-RO-1")
    provider = cloud.provider(choices=[f"{GPU}@SECURE/EU-RO-1", f"{GPU}@SECURE/US-KS-2"])
    assert (await provider.create(request_for())).place == "US-KS-2"
    assert len(cloud.sent("POST")) == 1


@in_virtual_time
async def test_fleets_with_one_key_share_capacity_memory() -> None:
    cloud = EmulatedRunpod()
    cloud.faults.no_capacity(GPU, is_announced=False)
    account = cloud.account()
    choices = [GPU, OTHER_GPU]
    await cloud.provider(account=account, choices=choices).create(request_for())
    await cloud.provider("blue", account=account, choices=choices).create(request_for(fleet="blue"))
    assert len(cloud.sent("POST")) == 3


@pytest.mark.parametrize(
    "other",
    [
        {"gpu_count": 1},
        {"gpu_count": 8, "min_cuda_version": "12.4"},
        {"gpu_count": 8, "choices": [f"{GPU}@SECURE/US-KS-2"]},
        {"gpu_count": 8, "has_volume": True},
    ],
    ids=lambda other: ", ".join(other),
)
def test_capacity_memory_distinguishes_kinds_of_pods(other: dict[str, Any]) -> None:
    @in_virtual_time
    async def learn() -> None:
        cloud = EmulatedRunpod()
        account = cloud.account()
        if other.pop("has_volume", False):
            place = {"name": "v", "size": 10, "dataCenter": "EU-RO-1"}
            other["network_volume_id"] = cloud.client.post("/network-volumes", json=place).json()["id"]
        cloud.faults.next_create(400, detail=NO_CAPACITY)
        with pytest.raises(NoCapacity):
            await cloud.provider(account=account, gpu_count=8).create(request_for())
        await cloud.provider("blue", account=account, **other).create(request_for(fleet="blue"))
        assert len(cloud.pods) == 1

    learn()


@in_virtual_time
async def test_stock_is_read_per_gpu_count() -> None:
    cloud = EmulatedRunpod()
    account = cloud.account()
    for count in (1, 8, 1):
        await cloud.provider(account=account, gpu_count=count).list_machines()
    assert len(cloud.sent("GET", "/catalog/gpus")) == 2


@pytest.mark.parametrize(
    ("status", "error", "message", "tried"),
    [
        (401, Denied, r"missing bearer token \(401\): check runpod_api_key", 1),
        (402, LimitReached, r"Your account balance is too low .*\(402\): add funds to the Runpod account", 1),
        (403, Denied, r"access denied \(403\): the key lacks a permission, or the account may not use this choice", 2),
        (404, InvalidRequest, r"resource not found \(404\): check the runpod settings of fleet red", 1),
        (400, InvalidRequest, r"request could not be processed \(400\): check the runpod settings of fleet red", 2),
        (422, InvalidRequest, r"Request validation failed. \(422\): check the runpod settings", 1),
        (500, Ambiguous, r"internal server error \(500\)", 1),
        (502, Ambiguous, r"upstream request failed \(502\)", 1),
        (503, Ambiguous, r"service temporarily unavailable \(503\)", 1),
        (504, Ambiguous, r"upstream request timed out \(504\)", 1),
        (408, Ambiguous, r"request failed \(408\)", 1),
    ],
)
def test_each_creation_failure_maps_to_one_error(status: int, error: type[Exception], message: str, tried: int) -> None:
    """After 400 and 403 the next choice is tried. Nothing else is sent a second time."""

    @in_virtual_time
    async def refused() -> None:
        cloud = EmulatedRunpod()
        cloud.faults.next_create(status, times=9)
        with pytest.raises(error, match=f"^creating pod red-0-aa: {message}") as caught:
            await cloud.provider(choices=[GPU, OTHER_GPU]).create(request_for())
        assert type(caught.value) is error
        assert len(cloud.sent("POST")) == tried
        assert cloud.pods == {}

    refused()


@in_virtual_time
async def test_error_contains_every_violation() -> None:
    cloud = EmulatedRunpod()
    errors = ["$.gpu: got string, want object", "$: additional properties 'x' not allowed"]
    cloud.faults.next(422, method="POST", errors=errors)
    with pytest.raises(InvalidRequest, match="got string, want object; .: additional properties 'x' not allowed"):
        await cloud.provider().create(request_for())


@in_virtual_time
async def test_no_capacity_wins_over_a_refused_choice() -> None:
    """NoCapacity holds the fleet briefly, and its message names the refused choice."""
    cloud = EmulatedRunpod()
    cloud.faults.no_capacity(GPU, is_announced=False)
    provider = cloud.provider(choices=["NVIDIA Abacus", GPU])
    message = (
        rf"no capacity for {GPU} in SECURE. .* Refused: NVIDIA Abacus in SECURE .gpu type 'NVIDIA Abacus' not found"
    )
    # The second attempt skips the choice without capacity.
    for _ in range(2):
        with pytest.raises(NoCapacity, match=message):
            await provider.create(request_for())
    cloud.faults.clear()
    await asyncio.sleep(301)
    assert (await provider.create(request_for())).instance_type == GPU


@in_virtual_time
async def test_forbidden_choice_is_skipped() -> None:
    cloud = EmulatedRunpod()
    cloud.faults.next_create(403)
    assert (await cloud.provider(choices=[GPU, OTHER_GPU]).create(request_for())).instance_type == OTHER_GPU


@pytest.mark.parametrize("takes_effect", [True, False])
@pytest.mark.parametrize("status", [None, 500, 504])
def test_unanswered_creation_is_sent_once_and_settled_by_a_list(takes_effect: bool, status: int | None) -> None:
    @in_virtual_time
    async def lose() -> None:
        cloud = EmulatedRunpod()
        provider = cloud.provider(choices=[GPU, OTHER_GPU])
        cloud.faults.next(status, method="POST", path="/v2/pods", takes_effect=takes_effect)
        with pytest.raises(Ambiguous, match="creating pod red-0-aa: "):
            await provider.create(request_for())
        await asyncio.sleep(60)
        assert len(cloud.sent("POST")) == 1
        assert [machine.name for machine in await provider.list_machines()] == ["red-0-aa"] * takes_effect

    lose()


@in_virtual_time
async def test_existing_pod_with_the_name_is_adopted() -> None:
    cloud = EmulatedRunpod()
    first = await cloud.provider().create(request_for())
    cloud.client.post("/pods", json={"name": "red-1-aa", "image": "i", "gpu": {"id": GPU}})
    provider = cloud.provider()
    assert (await provider.create(request_for())).id == first.id
    # A foreign pod with the same name is not adopted.
    assert (await provider.create(request_for(1))).name == "red-1-aa"
    assert len(cloud.pods) == 3


@in_virtual_time
async def test_no_pod_is_created_without_a_list() -> None:
    cloud = EmulatedRunpod()
    cloud.faults.next_list(503, times=9)
    # No creation was sent, so the error is not Ambiguous.
    with pytest.raises(Throttled, match=r"creating pod red-0-aa: no list of pods \(service temporarily unavailable"):
        await cloud.provider().create(request_for())
    cloud.faults.clear()
    cloud.faults.next_list(None, times=9)
    with pytest.raises(Throttled, match="creating pod red-0-aa: no list of pods within 55 s"):
        await cloud.provider().create(request_for())
    assert cloud.sent("POST") == []


@in_virtual_time
async def test_no_request_is_sent_without_a_join_token() -> None:
    cloud = EmulatedRunpod()
    with pytest.raises(InvalidRequest, match="no join token"):
        await cloud.provider().create(replace(request_for(), join_token=None))
    assert cloud.sent() == []


@in_virtual_time
async def test_pod_without_price_gets_the_catalog_price_after_a_while() -> None:
    cloud = EmulatedRunpod()
    provider = cloud.provider(gpu_count=2)
    machine = await provider.create(request_for())
    cloud.pods[machine.id].micros_per_hour = 0
    (listed,) = await cloud.provider(gpu_count=2).list_machines()
    assert (listed.price_micros_per_hour, listed.currency) == (None, None), "the pod may still report its price"
    await asyncio.sleep(300)
    (listed,) = await cloud.provider(gpu_count=2).list_machines()
    assert (listed.price_micros_per_hour, listed.currency) == (1_380_000 + DISK, "USD")
    cloud.pods[machine.id].micros_per_hour = 1_000_000
    (listed,) = await cloud.provider(gpu_count=2).list_machines()
    assert listed.price_micros_per_hour == 1_000_000 + DISK


@in_virtual_time
async def test_pod_is_running_once_it_has_a_runtime() -> None:
    cloud = EmulatedRunpod(provisioning_s=2, starting_s=6, runtime_s=5)
    provider = cloud.provider(ports=["22/tcp"])
    await provider.create(request_for())
    states = []
    for _ in range(4):
        await asyncio.sleep(6)
        (machine,) = await provider.list_machines()
        states.append((machine.state, machine.address is not None))
    booting, running = (MachineState.BOOTING, False), (MachineState.RUNNING, True)
    assert states == [booting, booting, running, running]


@pytest.mark.parametrize("dies_as", ["EXITED", "ERROR"])
def test_stopped_pod_is_deleted_and_never_restarted(dies_as: str) -> None:
    @in_virtual_time
    async def die() -> None:
        cloud = EmulatedRunpod()
        cloud.faults.next_pod(dies_after_s=5, dies_as=dies_as)
        provider = cloud.provider()
        await provider.create(request_for())
        await asyncio.sleep(30)
        (machine,) = await provider.list_machines()
        assert machine.state is MachineState.EXITED
        assert machine.note is not None
        await provider.delete(machine)
        assert cloud.pods == {}
        assert [path for _, _, path in cloud.sent("POST")] == ["/v2/pods"], "no pod is started again"

    die()


@in_virtual_time
async def test_recent_list_is_reused_with_our_own_changes() -> None:
    cloud = EmulatedRunpod()
    provider = cloud.provider()
    assert await provider.list_machines() == ()
    made = await provider.create(request_for(0))
    assert [machine.id for machine in await provider.list_machines()] == [made.id]
    await provider.delete(made)
    assert await provider.list_machines() == ()
    # The list, the pod by id, and the list again: a pod this new may not be found by its id although it exists.
    assert [path for _, _, path in cloud.sent("GET", "/v2/pods")] == ["/v2/pods", f"/v2/pods/{made.id}", "/v2/pods"]


@in_virtual_time
async def test_fleets_with_one_key_share_a_list() -> None:
    cloud = EmulatedRunpod()
    account = cloud.account()
    red, blue = cloud.provider(account=account), cloud.provider("blue", account=account)
    await red.create(request_for())
    await asyncio.sleep(10)
    found = await asyncio.gather(red.list_machines(), blue.list_machines())
    assert [len(machines) for machines in found] == [1, 0]
    assert len([each for each in cloud.sent("GET") if each[2] == "/v2/pods"]) == 2


@in_virtual_time
async def test_failed_list_is_retried_then_unavailable() -> None:
    cloud = EmulatedRunpod()
    provider = cloud.provider(list_reuse_s=0.0)
    cloud.faults.next_list(503, times=2)
    assert await provider.list_machines() == ()
    cloud.faults.next_list(503, times=3)
    with pytest.raises(Unavailable, match=r"listing the pods of fleet red: service temporarily unavailable \(503\)"):
        await provider.list_machines()
    cloud.faults.next_list(401)
    with pytest.raises(Unavailable, match="check runpod_api_key"):
        await provider.list_machines()


@in_virtual_time
async def test_copy_of_a_pod_under_another_name_is_foreign() -> None:
    cloud = EmulatedRunpod()
    provider = cloud.provider(list_reuse_s=0.0)
    made = await provider.create(request_for())
    order = {"name": "my experiment", "image": "i", "gpu": {"id": GPU}, "env": cloud.pods[made.id].config.env}
    cloud.client.post("/pods", json=order).raise_for_status()
    assert [machine.id for machine in await provider.list_machines()] == [made.id]


@in_virtual_time
async def test_deletion_without_effect_is_repeated() -> None:
    cloud = EmulatedRunpod()
    provider = cloud.provider()
    machine = await provider.create(request_for())
    cloud.faults.next_delete(does_nothing=True, times=2)
    ended_at = await provider.delete(machine)
    assert cloud.pods == {}
    assert len(cloud.sent("DELETE")) == 3
    assert ended_at is not None
    (line,) = cloud.emulator.bill()["pods"]
    assert abs((ended_at - machine.created_at).total_seconds() - line["seconds"]) <= 1


@in_virtual_time
async def test_new_pod_that_is_not_found_is_checked_against_the_list() -> None:
    cloud = EmulatedRunpod()
    provider = cloud.provider()
    machine = await provider.create(request_for())
    cloud.faults.next_delete(does_nothing=True)
    cloud.faults.next_get(404)
    await provider.delete(machine)
    assert cloud.pods == {}
    assert len(cloud.sent("DELETE")) == 2


@in_virtual_time
async def test_pod_that_survives_all_deletions_is_reported() -> None:
    cloud = EmulatedRunpod()
    provider = cloud.provider()
    machine = await provider.create(request_for())
    cloud.faults.next_delete(does_nothing=True, times=99)
    with pytest.raises(Unavailable, match=f"deleting pod {machine.id} of red-0-aa: the pod still exists"):
        await provider.delete(machine)
    assert machine.id in cloud.pods


@in_virtual_time
async def test_failed_deletion_reports_the_vendors_message() -> None:
    cloud = EmulatedRunpod()
    provider = cloud.provider()
    machine = await provider.create(request_for())
    cloud.faults.next_delete(409, times=99)
    with pytest.raises(
        Unavailable, match=r"the pod still exists, .* \(action not valid for current pod status \(409\)\)"
    ):
        await provider.delete(machine)


@in_virtual_time
async def test_not_found_is_no_proof_while_the_pod_is_listed() -> None:
    cloud = EmulatedRunpod()
    provider = cloud.provider()
    machine = await provider.create(request_for())
    await asyncio.sleep(120)
    cloud.faults.next_delete(404, times=2)
    await provider.delete(machine)
    assert cloud.pods == {}
    assert len(cloud.sent("DELETE")) == 3


@in_virtual_time
async def test_hidden_new_pod_is_not_reported_gone() -> None:
    cloud = EmulatedRunpod()
    cloud.faults.new_pods_hide(50)
    cloud.faults.list_lags(40)
    provider = cloud.provider()
    machine = await provider.create(request_for())
    with pytest.raises(Unavailable, match="not confirmed yet"):
        await provider.delete(machine)
    await asyncio.sleep(30)
    await provider.delete(machine)
    assert cloud.pods == {}
    # An orchestrator that knows only the worker's row.
    machine = await provider.create(request_for(1))
    with pytest.raises(Unavailable, match="not confirmed yet"):
        await cloud.provider().delete(Machine(machine.id, machine.name, MachineState.RUNNING))
    assert machine.id in cloud.pods


@in_virtual_time
async def test_vanished_pod_is_gone_by_list_and_age() -> None:
    cloud = EmulatedRunpod()
    provider = cloud.provider()
    machine = await provider.create(request_for())
    await asyncio.sleep(120)
    cloud.client.delete(f"/pods/{machine.id}")
    await provider.list_machines()
    assert await provider.delete(machine) is None


@in_virtual_time
async def test_unanswered_deletion_is_verified() -> None:
    cloud = EmulatedRunpod()
    provider = cloud.provider()
    one, other = [await provider.create(request_for(slot)) for slot in range(2)]
    await asyncio.sleep(120)
    cloud.faults.next_delete(times_out_after_taking_effect=True)
    await provider.delete(one)
    cloud.faults.next_delete(500)
    await provider.delete(other)
    assert cloud.pods == {}


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (401, Denied, "check runpod_api_key .* The pod is billed until then"),
        (403, Denied, "The pod is billed until then"),
        (429, Throttled, "rate limit exceeded"),
    ],
)
def test_denied_deletion_is_reported_and_pod_remains(status: int, error: type[Exception], message: str) -> None:
    @in_virtual_time
    async def deny() -> None:
        cloud = EmulatedRunpod()
        provider = cloud.provider()
        machine = await provider.create(request_for())
        cloud.faults.next_delete(status)
        with pytest.raises(error, match=f"^deleting pod {machine.id} of red-0-aa: .*{message}"):
            await provider.delete(machine)
        assert machine.id in cloud.pods

    deny()


@in_virtual_time
async def test_foreign_pod_is_not_deleted() -> None:
    cloud = EmulatedRunpod()
    theirs = cloud.client.post("/pods", json={"name": "red-0-aa", "image": "i", "gpu": {"id": GPU}}).json()
    with pytest.raises(Refused, match="the pod has lost our tag. Terminate it in Runpod's console"):
        await cloud.provider().delete(Machine(theirs["id"], "red-0-aa", MachineState.RUNNING))
    assert theirs["id"] in cloud.pods
    assert cloud.sent("DELETE") == []


def test_boot_log_can_be_stored_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        cloud = EmulatedRunpod()
        monkeypatch.setattr(cloud.host, "log_lines", lambda _: ["x" * 1500] * 30 + ["core\0dumped"])
        provider = cloud.provider()
        text = await provider.boot_log(await provider.create(request_for()))
        assert text.endswith("core\\0dumped")
        assert len(text) == MAX_BOOT_LOG_CHARACTERS

    run(scenario())
