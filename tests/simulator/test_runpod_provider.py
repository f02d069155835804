"""The Runpod provider against the emulated API in virtual time: what it asks for, and what it makes of the answers."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, NoReturn

import pytest

from support.runpod_fixture import GPU, IMAGE, OTHER_GPU, TOKEN, URL, Bed, request_for, virtually
from windlass.model.errors import (
    Ambiguous,
    Denied,
    InvalidRequest,
    LimitReached,
    NoCapacity,
    NotPrepared,
    ProviderError,
    Refused,
    Throttled,
    Unavailable,
)
from windlass.model.machine import Machine, MachineState, Volume
from windlass.model.runpod import RunpodSettings
from windlass.providers.fingerprint import fingerprint
from windlass.providers.runpod.doctor_checks import run_checks
from windlass.providers.runpod.limiter import RunpodLimiter
from windlass.providers.runpod.provider import RunpodProvider
from windlass.providers.runpod.provisioning import Preparer
from windlass.providers.runpod.ssh import CommandResult, Endpoint, Unreachable
from windlass.simulator.loop import virtual_now
from windlass_emulators.runpod.errors import NO_CAPACITY

BOOTED_S = 10.0

# ------------------------------------------------------------------------------------------------------------ create


@pytest.mark.parametrize(("status", "detail"), [(403, "not in your plan"), (400, "this type is retired")])
def test_that_a_choice_is_refused_is_told_although_another_is_had(status: int, detail: str) -> None:
    @virtually
    async def live() -> None:
        bed = Bed()
        provider = bed.provider(choices=[GPU, OTHER_GPU])
        assert provider.traits.refused_choices == ()
        bed.faults.next_create(status, detail=detail)
        assert (await provider.create(request_for())).instance_type == OTHER_GPU
        assert provider.traits.refused_choices == ((f"{GPU} in SECURE", f"{detail} ({status})"),)
        await asyncio.sleep(3500)
        assert provider.traits.refused_choices
        await provider.create(request_for(1))
        assert provider.traits.refused_choices == (), "it was had"

    live()


@virtually
async def test_a_pod_is_what_was_asked_for_and_what_it_costs_is_known() -> None:
    bed = Bed(is_judged=True)
    volume = bed.client.post("/network-volumes", json={"name": "d", "size": 100, "dataCenter": "EU-RO-1"}).json()
    registry = bed.client.post("/registries", json={"name": "r", "username": "u", "password": "p"}).json()
    provider = bed.provider(
        choices=[f"{GPU}@SECURE/EU-RO-1/US-KS-2"], gpu_count=2, min_cuda_version="12.6", args="serve --fast",
        env={"MODEL": "large"}, ports=["8888/http"], disk_gb=40, network_volume_id=volume["id"], volume_path="/data",
        registry_id=registry["id"],
    )  # fmt: skip
    machine = await provider.create(request_for(slot=3))
    (pod,) = bed.pods.values()
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
        price_micros_per_hour=1_380_000,
        currency="USD",
    )


@virtually
async def test_a_pod_comes_from_a_template_where_one_is_named() -> None:
    bed = Bed(is_judged=True)
    template = {"name": "t", "image": "example/other:2", "env": {"A": "1"}, "disk": 30}
    made = bed.client.post("/templates", json=template).json()
    await bed.provider(template_id=made["id"], image=None).create(request_for())
    (pod,) = bed.pods.values()
    assert (pod.config.image, pod.config.disk_gb, pod.config.env["A"]) == ("example/other:2", 30, "1")


@virtually
async def test_a_pod_that_is_to_be_prepared_lets_us_in() -> None:
    bed = Bed(is_judged=True)
    await bed.provider(public_key="ssh-ed25519 OURS", env={"PUBLIC_KEY": "ssh-ed25519 MINE"}).create(request_for())
    (pod,) = bed.pods.values()
    assert pod.config.env["PUBLIC_KEY"] == "ssh-ed25519 OURS\nssh-ed25519 MINE"
    assert pod.config.ports == ["22/tcp"]


@virtually
async def test_no_capacity_moves_on_to_the_next_choice_and_is_remembered() -> None:
    bed = Bed()
    bed.faults.no_capacity(GPU, "SECURE", is_announced=False)
    provider = bed.provider(choices=[GPU, f"{GPU}@COMMUNITY", OTHER_GPU])
    first = await provider.create(request_for(0))
    assert (first.instance_type, first.price_micros_per_hour) == (GPU, 340_000)
    assert len(bed.asked("POST", "/pods")) == 2
    await provider.create(request_for(1))
    assert len(bed.asked("POST", "/pods")) == 3
    bed.faults.clear()
    await asyncio.sleep(300)
    assert (await provider.create(request_for(2))).price_micros_per_hour == 690_000


@virtually
async def test_when_all_choices_are_out_nothing_is_asked_until_that_may_have_changed() -> None:
    bed = Bed()
    bed.faults.no_capacity(is_announced=False)
    provider = bed.provider(choices=[f"{GPU}@SECURE/EU-RO-1", OTHER_GPU])
    words = f"creating pod red-0-aa: no capacity for {GPU} in SECURE/EU-RO-1, {OTHER_GPU} in SECURE. Wait, or add"
    with pytest.raises(NoCapacity, match=words):
        await provider.create(request_for())
    asked = len(bed.asked("POST"))
    with pytest.raises(NoCapacity):
        await provider.create(request_for())
    assert len(bed.asked("POST")) == asked == 2


@virtually
async def test_a_choice_that_the_catalog_says_is_out_is_tried_last() -> None:
    bed = Bed()
    bed.faults.no_capacity(GPU, "SECURE", "EU-RO-1")
    provider = bed.provider(choices=[f"{GPU}@SECURE/EU-RO-1", f"{GPU}@SECURE/US-KS-2"])
    assert (await provider.create(request_for())).place == "US-KS-2"
    assert len(bed.asked("POST")) == 1


@virtually
async def test_what_one_fleet_learned_about_capacity_all_with_its_key_know() -> None:
    bed = Bed()
    bed.faults.no_capacity(GPU, is_announced=False)
    account = bed.account()
    choices = [GPU, OTHER_GPU]
    await bed.provider(account=account, choices=choices).create(request_for())
    await bed.provider("blue", account=account, choices=choices).create(request_for(fleet="blue"))
    assert len(bed.asked("POST")) == 3


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
def test_a_lack_of_one_kind_of_pod_is_no_lack_of_another(other: dict[str, Any]) -> None:
    @virtually
    async def learn() -> None:
        bed = Bed()
        account = bed.account()
        if other.pop("has_volume", False):
            place = {"name": "v", "size": 10, "dataCenter": "EU-RO-1"}
            other["network_volume_id"] = bed.client.post("/network-volumes", json=place).json()["id"]
        bed.faults.next_create(400, detail=NO_CAPACITY)
        with pytest.raises(NoCapacity):
            await bed.provider(account=account, gpu_count=8).create(request_for())
        await bed.provider("blue", account=account, **other).create(request_for(fleet="blue"))
        assert len(bed.pods) == 1

    learn()


@virtually
async def test_stock_is_known_for_each_number_of_gpus() -> None:
    bed = Bed()
    account = bed.account()
    for count in (1, 8, 1):
        await bed.provider(account=account, gpu_count=count).list_machines()
    assert len(bed.asked("GET", "/catalog/gpus")) == 2


@pytest.mark.parametrize(
    ("status", "error", "words", "tried"),
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
def test_each_refusal_is_what_it_means(status: int, error: type[Exception], words: str, tried: int) -> None:
    """400 and 403 may be another choice's luck; nothing else is sent a second time."""

    @virtually
    async def refused() -> None:
        bed = Bed()
        bed.faults.next_create(status, times=9)
        with pytest.raises(error, match=f"^creating pod red-0-aa: {words}") as caught:
            await bed.provider(choices=[GPU, OTHER_GPU]).create(request_for())
        assert type(caught.value) is error
        assert len(bed.asked("POST")) == tried
        assert bed.pods == {}

    refused()


@virtually
async def test_every_violation_is_told_in_the_vendors_words() -> None:
    bed = Bed()
    errors = ["$.gpu: got string, want object", "$: additional properties 'x' not allowed"]
    bed.faults.next(422, method="POST", errors=errors)
    with pytest.raises(InvalidRequest, match="got string, want object; .: additional properties 'x' not allowed"):
        await bed.provider().create(request_for())


@virtually
async def test_a_lack_of_machines_passes_whatever_is_wrong_with_another_choice() -> None:
    """And so the fleet is not held for long; but what only a person can mend is said."""
    bed = Bed()
    bed.faults.no_capacity(GPU, is_announced=False)
    provider = bed.provider(choices=["NVIDIA Abacus", GPU])
    words = rf"no capacity for {GPU} in SECURE. .* Refused: NVIDIA Abacus in SECURE .gpu type 'NVIDIA Abacus' not found"
    # The second time, what is out is not asked for.
    for _ in range(2):
        with pytest.raises(NoCapacity, match=words):
            await provider.create(request_for())
    bed.faults.clear()
    await asyncio.sleep(301)
    assert (await provider.create(request_for())).instance_type == GPU


@virtually
async def test_a_choice_that_this_account_may_not_have_leaves_the_others() -> None:
    bed = Bed()
    bed.faults.next_create(403)
    assert (await bed.provider(choices=[GPU, OTHER_GPU]).create(request_for())).instance_type == OTHER_GPU


@virtually
async def test_a_429_is_heeded_by_everybody_with_the_key() -> None:
    bed = Bed()
    account = bed.account()
    provider, other = bed.provider(account=account), bed.provider("blue", account=account)
    bed.faults.next(429, method="POST", retry_after_s=12)
    with pytest.raises(Throttled) as caught:
        await provider.create(request_for())
    assert caught.value.retry_after_s == 12
    assert bed.pods == {}
    began = virtual_now()
    await other.create(request_for(fleet="blue"))
    assert virtual_now() - began > timedelta(seconds=11)


@virtually
async def test_the_vendors_own_limits_are_never_reached() -> None:
    bed = Bed(requests_per_minute=30, requests_per_hour=600)
    provider = bed.provider(list_reuse_s=0.0)
    for slot in range(15):
        await provider.create(request_for(slot))
        await provider.list_machines()
    for machine in await provider.list_machines():
        while True:
            try:
                await provider.delete(machine)
                break
            except (Throttled, Unavailable):
                await asyncio.sleep(10)
    assert bed.pods == {}
    minutes = [at.replace(second=0) for at, _, _ in bed.emulator.requests]
    assert all(window.remaining(virtual_now()) > 0 for window in bed.emulator._windows)
    assert max(minutes.count(minute) for minute in set(minutes)) <= 60


@pytest.mark.parametrize("takes_effect", [True, False])
@pytest.mark.parametrize("status", [None, 500, 504])
def test_a_creation_without_an_answer_is_sent_once_and_settled_by_a_list(
    takes_effect: bool, status: int | None
) -> None:
    @virtually
    async def lose() -> None:
        bed = Bed()
        provider = bed.provider(choices=[GPU, OTHER_GPU])
        bed.faults.next(status, method="POST", path="/v2/pods", takes_effect=takes_effect)
        with pytest.raises(Ambiguous, match="creating pod red-0-aa: "):
            await provider.create(request_for())
        await asyncio.sleep(60)
        assert len(bed.asked("POST")) == 1
        assert [machine.name for machine in await provider.list_machines()] == ["red-0-aa"] * takes_effect

    lose()


@virtually
async def test_a_pod_that_is_there_under_the_name_is_taken_over() -> None:
    bed = Bed()
    first = await bed.provider().create(request_for())
    bed.client.post("/pods", json={"name": "red-1-aa", "image": "i", "gpu": {"id": GPU}})
    provider = bed.provider()
    assert (await provider.create(request_for())).id == first.id
    # Somebody else's of the same name is none of ours.
    assert (await provider.create(request_for(1))).name == "red-1-aa"
    assert len(bed.pods) == 3


@virtually
async def test_without_a_list_nothing_is_made() -> None:
    bed = Bed()
    bed.faults.next_list(503, times=9)
    # Nothing was sent, so nothing is unclear.
    with pytest.raises(Throttled, match=r"creating pod red-0-aa: no list of pods \(service temporarily unavailable"):
        await bed.provider().create(request_for())
    bed.faults.clear()
    bed.faults.next_list(None, times=9)
    with pytest.raises(Throttled, match="creating pod red-0-aa: no list of pods within 55 s"):
        await bed.provider().create(request_for())
    assert bed.asked("POST") == []


@virtually
async def test_without_a_join_token_nothing_is_asked_for() -> None:
    bed = Bed()
    with pytest.raises(InvalidRequest, match="no join token"):
        await bed.provider().create(replace(request_for(), join_token=None))
    assert bed.asked() == []


@virtually
async def test_a_pod_that_does_not_tell_its_price_has_the_catalogs_after_a_while() -> None:
    bed = Bed()
    provider = bed.provider(gpu_count=2)
    machine = await provider.create(request_for())
    bed.pods[machine.id].micros_per_hour = 0
    (listed,) = await bed.provider(gpu_count=2).list_machines()
    assert (listed.price_micros_per_hour, listed.currency) == (None, None), "it may tell it yet"
    await asyncio.sleep(300)
    (listed,) = await bed.provider(gpu_count=2).list_machines()
    assert (listed.price_micros_per_hour, listed.currency) == (1_380_000, "USD")
    bed.pods[machine.id].micros_per_hour = 1_000_000
    (listed,) = await bed.provider(gpu_count=2).list_machines()
    assert listed.price_micros_per_hour == 1_000_000


# -------------------------------------------------------------------------------------------------------------- list


@virtually
async def test_a_pod_runs_when_something_runs_in_it() -> None:
    bed = Bed(provisioning_s=2, starting_s=6, runtime_s=5)
    provider = bed.provider(ports=["22/tcp"])
    await provider.create(request_for())
    states = []
    for _ in range(4):
        await asyncio.sleep(6)
        (machine,) = await provider.list_machines()
        states.append((machine.state, machine.address is not None))
    booting, running = (MachineState.BOOTING, False), (MachineState.RUNNING, True)
    assert states == [booting, booting, running, running]


@pytest.mark.parametrize("dies_as", ["EXITED", "ERROR"])
def test_a_pod_that_has_stopped_will_not_come_back(dies_as: str) -> None:
    @virtually
    async def die() -> None:
        bed = Bed()
        bed.faults.next_pod(dies_after_s=5, dies_as=dies_as)
        provider = bed.provider()
        await provider.create(request_for())
        await asyncio.sleep(30)
        (machine,) = await provider.list_machines()
        assert machine.state is MachineState.EXITED
        assert machine.note is not None
        await provider.delete(machine)
        assert bed.pods == {}
        assert [path for _, _, path in bed.asked("POST")] == ["/v2/pods"], "nothing is ever started again"

    die()


@virtually
async def test_a_list_is_given_again_for_a_moment_with_what_was_done_since() -> None:
    bed = Bed()
    provider = bed.provider()
    assert await provider.list_machines() == ()
    made = await provider.create(request_for(0))
    assert [machine.id for machine in await provider.list_machines()] == [made.id]
    await provider.delete(made)
    assert await provider.list_machines() == ()
    # The list, one look at the pod, and the list again: one so new may not be found though it is there.
    assert [path for _, _, path in bed.asked("GET", "/v2/pods")] == ["/v2/pods", f"/v2/pods/{made.id}", "/v2/pods"]


@virtually
async def test_all_fleets_with_a_key_share_a_list() -> None:
    bed = Bed()
    account = bed.account()
    red, blue = bed.provider(account=account), bed.provider("blue", account=account)
    await red.create(request_for())
    await asyncio.sleep(10)
    found = await asyncio.gather(red.list_machines(), blue.list_machines())
    assert [len(machines) for machines in found] == [1, 0]
    assert len([each for each in bed.asked("GET") if each[2] == "/v2/pods"]) == 2


@virtually
async def test_a_list_is_asked_for_again_and_then_unknown() -> None:
    bed = Bed()
    provider = bed.provider(list_reuse_s=0.0)
    bed.faults.next_list(503, times=2)
    assert await provider.list_machines() == ()
    bed.faults.next_list(503, times=3)
    with pytest.raises(Unavailable, match=r"listing the pods of fleet red: service temporarily unavailable \(503\)"):
        await provider.list_machines()
    bed.faults.next_list(401)
    with pytest.raises(Unavailable, match="check runpod_api_key"):
        await provider.list_machines()


@virtually
async def test_a_pod_that_somebody_made_from_ours_is_theirs() -> None:
    bed = Bed()
    provider = bed.provider(list_reuse_s=0.0)
    made = await provider.create(request_for())
    order = {"name": "my experiment", "image": "i", "gpu": {"id": GPU}, "env": bed.pods[made.id].config.env}
    bed.client.post("/pods", json=order).raise_for_status()
    assert [machine.id for machine in await provider.list_machines()] == [made.id]


# ------------------------------------------------------------------------------------------------------------ delete


@virtually
async def test_a_deletion_that_does_nothing_is_noticed_and_sent_again() -> None:
    bed = Bed()
    provider = bed.provider()
    machine = await provider.create(request_for())
    bed.faults.next_delete(does_nothing=True, times=2)
    ended_at = await provider.delete(machine)
    assert bed.pods == {}
    assert len(bed.asked("DELETE")) == 3
    assert ended_at is not None
    (line,) = bed.emulator.bill()["pods"]
    assert abs((ended_at - machine.created_at).total_seconds() - line["seconds"]) <= 1


@virtually
async def test_a_new_pod_that_is_not_found_is_looked_for_in_the_list_whatever_was_said_of_its_deletion() -> None:
    bed = Bed()
    provider = bed.provider()
    machine = await provider.create(request_for())
    bed.faults.next_delete(does_nothing=True)
    bed.faults.next_get(404)
    await provider.delete(machine)
    assert bed.pods == {}
    assert len(bed.asked("DELETE")) == 2


@virtually
async def test_a_deletion_that_does_nothing_for_ever_is_no_deletion() -> None:
    bed = Bed()
    provider = bed.provider()
    machine = await provider.create(request_for())
    bed.faults.next_delete(does_nothing=True, times=99)
    with pytest.raises(Unavailable, match=f"deleting pod {machine.id} of red-0-aa: the pod still exists"):
        await provider.delete(machine)
    assert machine.id in bed.pods


@virtually
async def test_why_a_pod_does_not_go_is_said_in_the_vendors_words() -> None:
    bed = Bed()
    provider = bed.provider()
    machine = await provider.create(request_for())
    bed.faults.next_delete(409, times=99)
    with pytest.raises(
        Unavailable, match=r"the pod still exists, .* \(action not valid for current pod status \(409\)\)"
    ):
        await provider.delete(machine)


@pytest.mark.parametrize("is_deleted", [True, False], ids=["deleted", "stopped"])
def test_a_pod_that_is_over_is_not_prepared_until_time_runs_out(is_deleted: bool) -> None:
    @virtually
    async def prepare() -> None:
        bed = Bed()

        def open_shell(*_: object) -> NoReturn:
            raise AssertionError("nobody can be reached there")

        preparer = Preparer(RunpodSettings(image=IMAGE), open_shell, bed.rng)
        provider = bed.provider(preparer=preparer, public_key="ssh-ed25519 OURS")
        machine = await provider.create(request_for())
        await asyncio.sleep(BOOTED_S)
        if is_deleted:
            bed.client.delete(f"/pods/{machine.id}")
        else:
            bed.emulator.account.stop(bed.pods[machine.id])
        began = virtual_now()
        with pytest.raises(NotPrepared, match=f"preparing pod {machine.id} of red-0-aa: the pod ") as caught:
            await provider.prepare(machine, "its key", unheard)
        assert (caught.value.code, caught.value.host_key) == ("MACHINE_GONE", "its key")
        # A new one may hide for a minute.
        assert virtual_now() - began < timedelta(seconds=75)

    prepare()


async def unheard(_host_key: str) -> None: ...


class Pod:
    """A shell on a pod where all is well, once somebody answers there."""

    host_key = "its key"

    def __init__(self, answers_at: datetime) -> None:
        self.answers_at = answers_at
        self.endpoints: list[Endpoint] = []

    @asynccontextmanager
    async def open(self, endpoint: Endpoint, _host_key: str | None) -> AsyncIterator["Pod"]:
        self.endpoints.append(endpoint)
        if virtual_now() < self.answers_at:
            raise Unreachable("nobody answers")
        yield self

    async def run(self, command: str, _timeout_s: float) -> CommandResult:
        said = {"nvidia-smi": "L40S, 46068", "df": "disk 99999999 1 99999999 1 /"}
        return CommandResult(0, said.get(command.split(maxsplit=1)[0], ""))


async def pod_in_an_outage(answers_after_s: float, outage_s: float) -> tuple[RunpodProvider, Machine, Pod]:
    """The API goes away when the pod has just come to run, and comes back later."""
    bed = Bed()
    pod = Pod(virtual_now() + timedelta(seconds=answers_after_s))
    preparer = Preparer(RunpodSettings(image=IMAGE), pod.open, bed.rng)
    provider = bed.provider(preparer=preparer, public_key="ssh-ed25519 OURS")
    await provider.create(request_for())
    await asyncio.sleep(BOOTED_S * 2)
    (machine,) = await provider.list_machines()
    assert machine.address is not None
    bed.faults.next(503, times=10**6)
    asyncio.get_running_loop().call_later(outage_s, bed.faults.clear)
    await asyncio.sleep(6)  # a list is given again for so long
    return provider, machine, pod


@virtually
async def test_while_the_api_is_away_a_pod_is_prepared_where_it_was_last() -> None:
    provider, machine, pod = await pod_in_an_outage(answers_after_s=60, outage_s=3600)
    assert (await provider.prepare(machine, None, unheard)).host_key == pod.host_key
    assert {f"{endpoint.host}:{endpoint.port}" for endpoint in pod.endpoints} == {machine.address}


@pytest.mark.parametrize("outage_s", [3600, 200], ids=["all the time", "a part of it"])
def test_an_outage_of_the_api_condemns_no_pod(outage_s: float) -> None:
    @virtually
    async def live() -> None:
        provider, machine, _ = await pod_in_an_outage(answers_after_s=600, outage_s=outage_s)
        with pytest.raises(Unavailable, match=f"preparing pod {machine.id} of red-0-aa: not done within 300 s"):
            await provider.prepare(machine, None, unheard)

    live()


@virtually
async def test_a_deletion_that_is_not_found_is_no_proof_while_a_list_has_the_pod() -> None:
    bed = Bed()
    provider = bed.provider()
    machine = await provider.create(request_for())
    await asyncio.sleep(120)
    bed.faults.next_delete(404, times=2)
    await provider.delete(machine)
    assert bed.pods == {}
    assert len(bed.asked("DELETE")) == 3


@virtually
async def test_a_new_pod_that_hides_is_not_taken_for_gone() -> None:
    bed = Bed()
    bed.faults.new_pods_hide(50)
    bed.faults.list_lags(40)
    provider = bed.provider()
    machine = await provider.create(request_for())
    with pytest.raises(Unavailable, match="not confirmed yet"):
        await provider.delete(machine)
    await asyncio.sleep(30)
    await provider.delete(machine)
    assert bed.pods == {}
    # An orchestrator that knows no more than the row.
    machine = await provider.create(request_for(1))
    with pytest.raises(Unavailable, match="not confirmed yet"):
        await bed.provider().delete(Machine(machine.id, machine.name, MachineState.RUNNING))
    assert machine.id in bed.pods


@virtually
async def test_a_pod_that_vanished_is_gone_by_a_list_and_its_age() -> None:
    bed = Bed()
    provider = bed.provider()
    machine = await provider.create(request_for())
    await asyncio.sleep(120)
    bed.client.delete(f"/pods/{machine.id}")
    await provider.list_machines()
    assert await provider.delete(machine) is None


@virtually
async def test_a_deletion_whose_answer_is_lost_is_looked_after() -> None:
    bed = Bed()
    provider = bed.provider()
    one, other = [await provider.create(request_for(slot)) for slot in range(2)]
    await asyncio.sleep(120)
    bed.faults.next_delete(times_out_after_taking_effect=True)
    await provider.delete(one)
    bed.faults.next_delete(500)
    await provider.delete(other)
    assert bed.pods == {}


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (401, Denied, "check runpod_api_key .* The pod is billed until then"),
        (403, Denied, "The pod is billed until then"),
        (429, Throttled, "rate limit exceeded"),
    ],
)
def test_a_deletion_that_is_denied_is_not_gone(status: int, error: type[Exception], words: str) -> None:
    @virtually
    async def deny() -> None:
        bed = Bed()
        provider = bed.provider()
        machine = await provider.create(request_for())
        bed.faults.next_delete(status)
        with pytest.raises(error, match=f"^deleting pod {machine.id} of red-0-aa: .*{words}"):
            await provider.delete(machine)
        assert machine.id in bed.pods

    deny()


@virtually
async def test_what_is_not_ours_is_not_touched_whatever_we_are_told() -> None:
    bed = Bed()
    theirs = bed.client.post("/pods", json={"name": "red-0-aa", "image": "i", "gpu": {"id": GPU}}).json()
    with pytest.raises(Refused, match="the pod has lost our tag. Terminate it in Runpod's console"):
        await bed.provider().delete(Machine(theirs["id"], "red-0-aa", MachineState.RUNNING))
    assert theirs["id"] in bed.pods
    assert bed.asked("DELETE") == []


# ------------------------------------------------------------------------------------------------------------ doctor


@virtually
async def test_the_doctor_finds_everything_in_order() -> None:
    bed = Bed(is_judged=True)
    volume = bed.client.post("/network-volumes", json={"name": "d", "size": 100, "dataCenter": "EU-RO-1"}).json()
    settings = RunpodSettings(image="i", choices=[f"{GPU}@SECURE/EU-RO-1"], network_volume_id=volume["id"])
    await bed.provider().create(request_for())
    remarks = [remark async for remark in run_checks(bed.account(), "this", {"red": settings})]
    assert [(remark.check, remark.message, remark.advice) for remark in remarks] == [
        ("runpod", "key valid, windlass pods: 1", ""),
        ("volume", "d (100 GB in EU-RO-1)", ""),
        ("gpu type", f"{GPU} in SECURE/EU-RO-1, 0.69 USD per hour", ""),
    ]
    assert {method for _, method, _ in bed.asked()} == {"GET", "POST"}


@pytest.mark.parametrize(
    ("settings", "check", "what", "is_grave"),
    [
        ({"choices": ["NVIDIA Abacus"]}, "gpu type", "NVIDIA Abacus does not exist", True),
        ({"choices": ["NVIDIA H200@COMMUNITY"]}, "gpu type", "NVIDIA H200 is not offered in COMMUNITY", True),
        ({"gpu_count": 9}, "gpu type", "can have at most 8 of", True),
        ({"choices": [f"{OTHER_GPU}@SECURE/EU-RO-1"]}, "gpu type", "SECURE/EU-RO-1 is out of stock", False),
        ({"network_volume_id": "nope"}, "volume", "network volume nope: network volume not found (404)", True),
        ({"registry_id": "nope"}, "registry", "registry nope: ", True),
    ],
)  # fmt: skip
def test_the_doctor_says_what_stands_in_the_way(
    settings: dict[str, Any], check: str, what: str, is_grave: bool
) -> None:
    @virtually
    async def look() -> None:
        bed = Bed()
        bed.faults.no_capacity(OTHER_GPU, "*", "EU-RO-1")
        given = RunpodSettings(**{"image": "i", "choices": [GPU], **settings})
        remarks = [remark async for remark in run_checks(bed.account(), "this", {"red": given})]
        (found,) = [remark for remark in remarks if remark.check == check]
        assert what in found.message
        assert (found.is_error, bool(found.advice)) == (is_grave, True)

    look()


@virtually
async def test_the_doctor_finds_a_volume_that_is_elsewhere_and_pods_nobody_looks_after() -> None:
    bed = Bed()
    volume = bed.client.post("/network-volumes", json={"name": "d", "size": 100, "dataCenter": "EU-RO-1"}).json()
    given = RunpodSettings(image="i", choices=[f"{GPU}@SECURE/US-KS-2"], network_volume_id=volume["id"])
    await bed.provider("blue").create(request_for(fleet="blue"))
    remarks = [remark async for remark in run_checks(bed.account(), "this", {"red": given})]
    assert remarks[0].message == "pods exist of fleets that are not configured: blue"
    assert remarks[1].message == f"d is in EU-RO-1, but {GPU} in SECURE/US-KS-2 is not"
    bed.faults.next_list(401)
    (denied,) = [remark async for remark in run_checks(bed.account(), None, {"red": given})]
    assert (denied.is_error, denied.message) == (True, "missing bearer token (401)")


@virtually
async def test_the_doctor_names_pods_of_other_databases_and_touches_none() -> None:
    bed = Bed()
    for slot, identity in enumerate(("this", "old", "old", "older")):
        await bed.provider(identity=identity).create(request_for(slot))
    bed.client.post("/pods", json={"name": "theirs", "image": IMAGE, "gpu": {"id": GPU}})
    given = RunpodSettings(image="i", choices=[GPU])
    remarks = [remark async for remark in run_checks(bed.account(), "this", {"red": given})]
    assert remarks[0].message == "key valid, windlass pods: 1"
    assert sorted((remark.message, bool(remark.advice), remark.is_error) for remark in remarks[1:3]) == sorted(
        (
            f"pods of another windlass database in this account: {count} "
            f"(WINDLASS_POD begins with {fingerprint(identity)}/)",
            True,
            False,
        )
        for identity, count in (("old", 2), ("older", 1))
    )
    assert len(bed.pods) == 5


@virtually
async def test_a_limiter_spreads_what_is_left_over_the_time_until_it_is_renewed() -> None:
    limiter = RunpodLimiter(rate_per_s=10.0, burst=20)
    loop = asyncio.get_running_loop()
    limiter.record_response(200, {"RateLimit": '"minute";r=5;t=40, "hour";r=2800;t=1812, "day";r=49500;t=45012'})
    began = loop.time()
    for _ in range(5):
        await limiter.wait(60)
    assert 8 <= loop.time() - began <= 20
    limiter.record_response(200, {"RateLimit": '"minute";r=0;t=12'})
    with pytest.raises(Throttled):
        await limiter.wait(5)
    limiter.record_response(200, {})
    await asyncio.sleep(5)
    await limiter.wait(0)


# ---------------------------------------------------------------------------------------------------------- storage


def make_volume(bed: Bed, size_gb: int) -> str:
    body = {"name": "models", "size": size_gb, "dataCenter": "EU-RO-1"}
    return str(bed.client.post("/network-volumes", json=body).json()["id"])


@virtually
async def test_a_volume_grows_to_a_size_and_no_further_however_often_it_is_asked_for() -> None:
    bed = Bed(is_judged=True)
    volume_id = make_volume(bed, 100)
    provider = bed.provider(network_volume_id=volume_id)
    assert await provider.volume() == Volume(volume_id, 100)
    # Whether the first took effect nobody knows, and the second is harmless.
    bed.faults.next(500, method="PATCH", path="/v2/network-volumes/.*", takes_effect=True)
    with pytest.raises(Ambiguous):
        await provider.grow_volume(volume_id, 150)
    assert await provider.grow_volume(volume_id, 150) == Volume(volume_id, 150)
    assert await provider.grow_volume(volume_id, 120) == Volume(volume_id, 150)
    assert await provider.volume() == Volume(volume_id, 150)
    assert len(bed.asked("PATCH")) == 1


@virtually
async def test_a_volume_that_is_not_there_is_unknown_and_cannot_grow() -> None:
    bed = Bed()
    provider = bed.provider(network_volume_id="none")
    with pytest.raises(Unavailable, match="reading network volume none: .*not found"):
        await provider.volume()
    with pytest.raises(ProviderError, match="growing network volume none to 150 GB: .*not found"):
        await provider.grow_volume("none", 150)
    assert await bed.provider().volume() is None
