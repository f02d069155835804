"""Workers on pods of Runpod.

What it promises:
- A pod is ours if its environment carries a tag that names our database, our fleet and a worker, and it bears that
  worker's name. Any other is neither listed nor touched.
- `create` sends one request per choice of GPU, cloud and data centers, and none twice. A choice without capacity moves
  on to the next and is remembered; so does one that this account may not have, and a person is told of it. Where any
  was without capacity, that is the answer: it will pass, whatever is wrong with the others. What was sent and is not a
  clear no is Ambiguous.
  A pod that is there already under this name is taken over.
- `list_machines` is whole or raises. Lists that follow each other within seconds are answered from the last one, with
  what we did since.
- `delete` returns when a pod that was asked to go is not found by its id. That a deletion was accepted is not enough.
  Of a new pod, which may hide, a complete list must say the same; and where the deletion itself was answered with "not
  found", a list must, and the pod must be older than new ones may hide.
- A pod that has stopped is never started again: its GPUs may be somebody else's by then. It counts as exited.
- `prepare` (with `auto_start_worker`) looks a pod over by SSH and starts its worker's program, once.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog

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
from windlass.model.machine import Machine, MachineRequest, MachineState, Preparation, ProviderTraits, Volume
from windlass.model.runpod import GpuChoice, RunpodSettings
from windlass.ports.provider import OnHostKey
from windlass.providers.runpod import naming
from windlass.providers.runpod.account import Json, PodListing, RunpodAccount
from windlass.providers.runpod.catalog import CURRENCY, Offer, Want, in_order, micros_of, named
from windlass.providers.runpod.errors import HOW_TO_BE_LET_IN, RunpodError, RunpodErrorInfo, RunpodErrorKind
from windlass.providers.runpod.provisioning import Preparer
from windlass.providers.runpod.ssh import Endpoint

# Each shorter than the control loop's own limit, so that it is we who say what is known.
CREATE_TIMEOUT_S = 55.0
LIST_TIMEOUT_S = 50.0
DELETE_TIMEOUT_S = 55.0
# From one look at a pod that is being deleted to the next; a deletion usually takes a moment.
DELETE_LOOKS_S = (0.5, 2.0, 4.0, 8.0, 12.0, 12.0)
# A list is given again for this long.
LIST_REUSE_S = 5.0
# Whether a name is in use is asked for once; the list of the cycle that decided it will do.
NAME_CHECK_S = 30.0
# A new pod may cost nothing yet. Its bill is opened once, so it waits this long for the pod's own word, which counts
# from its creation, before it takes the catalog's.
COST_TOLD_BY_S = 300.0
# A choice that was refused is told of for this long, unless it is had before.
REFUSED_TOLD_S = 3600.0
# A new pod may not be found by its id for this long.
HIDDEN_S = 60.0

# For how long a list may be old; the vendor promises nothing. What is really gone costs nothing while we wait.
_ABSENCE_GRACE_S = 60.0
# A gateway gives up on what is behind it after a minute; what is behind it may still make a pod then. And the list that
# should show it may be old.
_CREATION_LATENESS_S = 60.0 + _ABSENCE_GRACE_S
# A pod deleted a moment ago may still be listed, and one made by a newer leader before its row is seen.
_STRAY_GRACE_S = _ABSENCE_GRACE_S
_PAUSE_S = 5.0
# A word of letters and digits. One of digits alone is a server's.
_POD_ID = re.compile(r"[A-Za-z0-9_-]+")

# Stopped or broken: it will not work again, and while it is there it may cost.
_EXITED = {"EXITED": "its pod has stopped", "ERROR": "its pod is in an error that it does not recover from"}
log = structlog.get_logger(__name__)


class RunpodProvider:
    """The pods of one fleet. `identity` tells our database from all others; all fleets with one key share an `account`.
    `url`: where pods find the control plane. With a `preparer`, and the public key that lets it in, workers are started
    over SSH; otherwise the image starts them."""

    def __init__(
        self,
        fleet: str,
        settings: RunpodSettings,
        account: RunpodAccount,
        *,
        identity: str,
        url: str,
        preparer: Preparer | None = None,
        public_key: str | None = None,
        list_reuse_s: float = LIST_REUSE_S,
        delete_looks_s: Sequence[float] = DELETE_LOOKS_S,
        hidden_s: float = HIDDEN_S,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._account = account
        self._tag = naming.fleet_tag(identity, fleet)
        self._url = url
        self._preparer = preparer
        self._public_key = public_key
        self._list_reuse_s = list_reuse_s
        self._delete_looks_s = delete_looks_s
        self._hidden_s = hidden_s
        self._now = now
        # Pod id to when we made it, or (None) knew that it was gone: what the last list may not have.
        self._changes: dict[str, tuple[float, Machine | None]] = {}
        # Pod id to when it was first not found, without having been seen to go.
        self._unfound: dict[str, datetime] = {}
        # What was refused of a choice, and when, while others could be had.
        self._refused: dict[GpuChoice, tuple[datetime, str]] = {}
        # By worker: one request for a pod at a time.
        self._creating: dict[str, asyncio.Task[Machine]] = {}

    @property
    def traits(self) -> ProviderTraits:
        return ProviderTraits(
            absence_grace_s=_ABSENCE_GRACE_S,
            creation_lateness_s=_CREATION_LATENESS_S,
            orphan_grace_s=_STRAY_GRACE_S,
            billing_unit_s=1,
            is_remote=True,
            key_hash=self._account.key_hash,
            has_prepare_step=self._preparer is not None,
            refused_choices=tuple(
                (str(choice), words)
                for choice, (at, words) in self._refused.items()
                if self._now() - at < timedelta(seconds=REFUSED_TOLD_S)
            ),
        )

    async def close(self) -> None:
        """Nothing to do: pods go on without us, and the account is shared."""

    # ------------------------------------------------------------------------------------------------------ create

    async def create(self, request: MachineRequest) -> Machine:
        running = self._creating.get(request.name)
        if running is not None:
            return await asyncio.shield(running)
        self._creating[request.name] = task = asyncio.ensure_future(self._create_in_time(request))
        try:
            return await task
        finally:
            del self._creating[request.name]

    async def _create_in_time(self, request: MachineRequest) -> Machine:
        doing = f"creating pod {request.name}"
        order = naming.order_of(request, self._settings, self._tag, url=self._url, public_key=self._public_key)
        give_up_at = asyncio.get_running_loop().time() + CREATE_TIMEOUT_S
        try:
            async with asyncio.timeout_at(give_up_at):
                found = await self._find(request.name, doing)
                if found is not None:
                    return found
                offers = await self._offers()
        except TimeoutError:
            raise Throttled(f"{doing}: no list of pods within {CREATE_TIMEOUT_S:g} s", _PAUSE_S) from None
        try:
            async with asyncio.timeout_at(give_up_at):
                pod = await self._create(order, offers, doing)
        except TimeoutError:
            raise Ambiguous(f"{doing}: no answer within {CREATE_TIMEOUT_S:g} s") from None
        machine = self._machine(pod, offers)
        self._note(machine.id, machine)
        return machine

    async def _find(self, name: str, doing: str) -> Machine | None:
        """The pod of this name, if there is one. Without having looked, nothing is made: names may be used twice."""
        now = asyncio.get_running_loop().time()
        try:
            listing = await self._account.list_pods(now - min(NAME_CHECK_S, self._list_reuse_s * 6))
        except Throttled:
            raise
        except RunpodError as trouble:
            if trouble.problem.kind is RunpodErrorKind.LOST:
                # Nothing was sent that could make a pod.
                raise Throttled(f"{doing}: no list of pods ({trouble.problem.words})", _PAUSE_S) from trouble
            raise self._refusal(trouble.problem, doing) from trouble
        return next((machine for machine in self._merged(listing, {}) if machine.name == name), None)

    async def _offers(self) -> Mapping[str, Mapping[str, Offer]]:
        # A hint, and a price that the pod itself will tell: not worth waiting for.
        clouds = {choice.cloud for choice in self._settings.ordered}
        return await self._account.offers(clouds, self._settings.gpu_count, max_wait_s=0.0)

    async def _create(self, order: Json, offers: Mapping[str, Mapping[str, Offer]], doing: str) -> Json:
        """One request per choice. A problem that another choice may not have is kept until all have been tried."""
        choices = self._settings.ordered
        exhausted = [choice for choice in choices if self._account.is_exhausted(self._want(choice))]
        refused: list[tuple[GpuChoice, RunpodErrorInfo]] = []
        for choice in in_order(choices, exhausted, offers):
            try:
                pod = await self._account.call("POST", "/pods", {**order, **naming.place_of(choice, self._settings)})
            except RunpodError as trouble:
                problem = trouble.problem
                if problem.kind not in (
                    RunpodErrorKind.NO_CAPACITY,
                    RunpodErrorKind.FORBIDDEN,
                    RunpodErrorKind.REFUSED,
                ):
                    raise self._refusal(problem, doing) from trouble
                log.info("choice not to be had", fleet=self._fleet, choice=str(choice), said=problem.words)
                if problem.kind is not RunpodErrorKind.NO_CAPACITY:
                    refused.append((choice, problem))
                else:
                    exhausted.append(choice)
                    self._account.note_no_capacity(self._want(choice), self._settings.capacity_memory_s)
            else:
                if not pod.get("id"):
                    raise Ambiguous(f"{doing}: an answer without the pod's id")
                self._refused.pop(choice, None)
                self._note_refused(refused)
                return pod
        raise self._no_capacity(doing, exhausted, refused) if exhausted else self._refusal(refused[-1][1], doing)

    def _want(self, choice: GpuChoice) -> Want:
        settings = self._settings
        return Want(choice, settings.gpu_count, settings.min_cuda_version, settings.network_volume_id)

    def _no_capacity(
        self, doing: str, exhausted: Sequence[GpuChoice], refused: Sequence[tuple[GpuChoice, RunpodErrorInfo]]
    ) -> NoCapacity:
        lacking = [choice for choice in self._settings.ordered if choice in exhausted]
        what = f"Runpod has none of {named(lacking)} now (wait, or add to runpod.choices of fleet {self._fleet})"
        # What only a person can mend is no reason to hold the others up, but a person must hear of it.
        self._note_refused(refused)
        wrong = [f"{choice}: {problem.words}" for choice, problem in refused]
        return NoCapacity("; ".join([f"{doing}: {what}", *wrong]) + ".")

    def _note_refused(self, refused: Sequence[tuple[GpuChoice, RunpodErrorInfo]]) -> None:
        for choice, problem in refused:
            log.warning("choice refused", fleet=self._fleet, choice=str(choice), said=problem.words)
            self._refused[choice] = (self._now(), problem.words)

    def _refusal(self, problem: RunpodErrorInfo, doing: str) -> ProviderError:
        said = f"{doing}: {problem.words}"
        match problem.kind:
            case RunpodErrorKind.BALANCE:
                return LimitReached(f"{said}: add funds to the Runpod account.")
            case RunpodErrorKind.DENIED:
                return Denied(f"{said}: {HOW_TO_BE_LET_IN}.")
            case RunpodErrorKind.FORBIDDEN:
                return Denied(
                    f"{said}: the key may not, or the account may not have this: check runpod_api_key, and "
                    f"runpod.choices of fleet {self._fleet}."
                )
            case RunpodErrorKind.THROTTLED:
                return Throttled(said, problem.retry_after_s or max(self._account.limiter.pause_s, _PAUSE_S))
            case RunpodErrorKind.LOST:
                return Ambiguous(said)
            case _:
                return InvalidRequest(f"{said}: check the runpod settings of fleet {self._fleet}.")

    # -------------------------------------------------------------------------------------------------------- list

    async def list_machines(self) -> tuple[Machine, ...]:
        doing = f"listing the pods of fleet {self._fleet}"
        try:
            async with asyncio.timeout(LIST_TIMEOUT_S):
                listing = await self._list(self._list_reuse_s)
                # Now, when nobody waits to be hired.
                offers = await self._offers() if self._account.limiter.spare() > 0 else {}
        except TimeoutError:
            raise Unavailable(f"{doing}: no whole list within {LIST_TIMEOUT_S:g} s") from None
        except RunpodError as trouble:
            hint = (
                f": {HOW_TO_BE_LET_IN}."
                if trouble.problem.kind in (RunpodErrorKind.DENIED, RunpodErrorKind.FORBIDDEN)
                else ""
            )
            raise Unavailable(f"{doing}: {trouble.problem.words}{hint}") from trouble
        except Throttled as throttled:
            raise Unavailable(f"{doing}: {throttled}") from throttled
        self._changes = {id_: change for id_, change in self._changes.items() if change[0] >= listing.began}
        return self._merged(listing, offers)

    async def _list(self, reuse_s: float) -> PodListing:
        return await self._account.list_pods(asyncio.get_running_loop().time() - reuse_s)

    def _merged(self, listing: PodListing, offers: Mapping[str, Mapping[str, Offer]]) -> tuple[Machine, ...]:
        """The list, and what we did since it was asked for."""
        machines = {
            str(pod["id"]): self._machine(pod, offers)
            for pod in listing.pods
            if naming.is_listed(pod, self._tag) and pod.get("status") != "TERMINATED"
        }
        for id_, (at, machine) in self._changes.items():
            if at < listing.began:
                continue
            if machine is None:
                machines.pop(id_, None)
            else:
                machines.setdefault(id_, machine)
        return tuple(machines.values())

    def _note(self, machine_id: str, machine: Machine | None) -> None:
        self._changes[machine_id] = (asyncio.get_running_loop().time(), machine)

    def _machine(self, pod: Json, offers: Mapping[str, Mapping[str, Offer]]) -> Machine:
        status = str(pod.get("status"))
        gpu, cloud = str((pod.get("gpu") or {}).get("id", "")), str(pod.get("cloud") or "")
        price, created_at = micros_of(pod.get("cost")), _moment(pod.get("createdAt"))
        is_new = created_at is not None and self._now() - created_at < timedelta(seconds=COST_TOLD_BY_S)
        if price is None and status not in _EXITED and not is_new:
            price = self._list_price(offers, gpu, cloud)
        endpoint = self._endpoint(pod)
        return Machine(
            id=str(pod["id"]),
            name=naming.worker_of(pod, self._tag) or str(pod.get("name")),
            state=_state(pod, status),
            created_at=created_at,
            address=f"{endpoint.host}:{endpoint.port}" if endpoint is not None else None,
            instance_type=gpu or None,
            place=str(pod.get("dataCenterId") or "") or None,
            price_micros_per_hour=price,
            currency=CURRENCY if price is not None else None,
            note=_EXITED.get(status),
        )

    def _list_price(self, offers: Mapping[str, Mapping[str, Offer]], gpu: str, cloud: str) -> int | None:
        """Of a pod that does not tell its own."""
        offer = offers.get(cloud, {}).get(gpu)
        if offer is None or offer.micros_per_hour is None:
            return None
        return offer.micros_per_hour * self._settings.gpu_count

    # ------------------------------------------------------------------------------------------------------ delete

    async def delete(self, machine: Machine) -> datetime | None:
        doing = f"deleting pod {machine.id} of {machine.name}"
        if not _POD_ID.fullmatch(machine.id) or machine.id.isdecimal():
            # Whoever has such a one, it is not known here that it is gone.
            raise Refused(f"{doing}: not a pod id. Delete the machine at the fleet's former provider.")
        try:
            async with asyncio.timeout(DELETE_TIMEOUT_S):
                return await self._delete(machine, doing)
        except TimeoutError:
            raise Unavailable(f"{doing}: it was not gone within {DELETE_TIMEOUT_S:g} s") from None
        except RunpodError as trouble:
            raise self._not_deleted(trouble.problem, doing) from trouble

    async def _delete(self, machine: Machine, doing: str) -> datetime | None:
        """When it was seen to go, which is when it stops to cost. None if that was not in answer to us."""
        change = self._changes.get(machine.id)
        if change is not None and change[1] is None:
            return None  # we know that it is gone
        if change is None and not await self._is_ours(machine.id):
            # Not ours to touch, and not gone: whoever took our mark off must say what becomes of it.
            raise Refused(
                f"{doing}: it does not carry our mark any more: terminate it in Runpod's console, or restore its "
                "environment; until then it is paid for."
            )
        ended_at: datetime | None = None
        said = ""
        for look_s in self._delete_looks_s:
            asked = asyncio.get_running_loop().time()
            try:
                ended_at = await self._send_deletion(machine.id)
            except RunpodError as trouble:
                # Not found, or in a state that will pass: we look for ourselves. No answer: so, too.
                if trouble.problem.kind not in (RunpodErrorKind.NOT_FOUND, RunpodErrorKind.BUSY, RunpodErrorKind.LOST):
                    raise
                said = f" ({trouble.problem.words})"
            await asyncio.sleep(look_s)
            if await self._is_gone(machine, asked, has_been_told=ended_at is not None):
                self._note(machine.id, None)
                self._unfound.pop(machine.id, None)
                return ended_at
        raise Unavailable(f"{doing}: it is still there, or that it is gone is not certain yet{said}")

    async def _is_ours(self, pod_id: str) -> bool:
        """Whether it may be touched. One that is not found may be a new one of ours: it is asked to go all the same,
        since ids are never used again."""
        pod = self._account.last_seen(pod_id) or await self._account.pod(pod_id)
        return pod is None or naming.worker_of(pod, self._tag) is not None

    async def _send_deletion(self, pod_id: str) -> datetime:
        return _within(await self._account.delete_pod(pod_id), self._now())

    async def _is_gone(self, machine: Machine, asked: float, *, has_been_told: bool) -> bool:
        if await self._account.pod(machine.id) is not None:
            self._unfound.pop(machine.id, None)
            return False
        if has_been_told and self._is_old(machine):
            return True
        # A new one may not be found though it is there, whatever was said of its deletion.
        listing = await self._account.list_pods(asked)
        if any(str(pod["id"]) == machine.id for pod in listing.pods):
            return False
        # Neither here nor there. Without a word, a new one may hide from both.
        return has_been_told or self._is_old(machine)

    def _is_old(self, machine: Machine) -> bool:
        """Whether it would have been found by now, if it were there."""
        since = machine.created_at or self._unfound.setdefault(machine.id, self._now())
        return self._now() - since >= timedelta(seconds=self._hidden_s)

    def _not_deleted(self, problem: RunpodErrorInfo, doing: str) -> ProviderError:
        said = f"{doing}: {problem.words}"
        match problem.kind:
            case RunpodErrorKind.DENIED | RunpodErrorKind.FORBIDDEN:
                return Denied(f"{said}: {HOW_TO_BE_LET_IN}; until then it is paid for.")
            case RunpodErrorKind.THROTTLED:
                return Throttled(said, problem.retry_after_s or max(self._account.limiter.pause_s, _PAUSE_S))
            case _:
                return Unavailable(said)

    # ----------------------------------------------------------------------------------------------------- prepare

    async def prepare(self, machine: Machine, host_key: str | None, on_host_key: OnHostKey) -> Preparation:
        if self._preparer is None:
            return Preparation()

        what = f"pod {machine.id} of {machine.name}"

        async def where() -> Endpoint | None:
            listing = await self._list(self._list_reuse_s)
            pod = next((pod for pod in listing.pods if str(pod["id"]) == machine.id), None)
            if pod is None and self._is_old(machine):
                # A list may lag. What is found neither there nor by its id is not waited for.
                pod = await self._account.pod(machine.id)
                if pod is None:
                    raise NotPrepared("MACHINE_GONE", f"preparing {what}: it is gone", host_key=host_key)
            if pod is not None and pod.get("status") in _EXITED:
                raise NotPrepared("MACHINE_GONE", f"preparing {what}: {_EXITED[pod['status']]}", host_key=host_key)
            return self._endpoint(pod) if pod is not None else None

        seen = self._account.last_seen(machine.id)
        last_known = self._endpoint(seen) if seen is not None else None
        return await self._preparer.prepare(what, where, host_key, on_host_key, last_known)

    # ----------------------------------------------------------------------------------------------------- storage

    async def volume(self) -> Volume | None:
        volume_id = self._settings.network_volume_id
        if volume_id is None:
            return None
        doing = f"looking at network volume {volume_id}"
        try:
            return _volume(await self._account.read(f"/network-volumes/{volume_id}"), doing)
        except RunpodError as trouble:
            raise Unavailable(f"{doing}: {trouble.problem.words}") from trouble

    async def grow_volume(self, volume_id: str, size_gb: int) -> Volume:
        doing = f"growing network volume {volume_id} to {size_gb} GB"
        try:
            found = _volume(await self._account.read(f"/network-volumes/{volume_id}"), doing)
            if found.size_gb >= size_gb:
                return found
            # To a size, not by one: sent twice, it has the effect of once.
            return _volume(await self._account.call("PATCH", f"/network-volumes/{volume_id}", {"size": size_gb}), doing)
        except RunpodError as trouble:
            raise self._refusal(trouble.problem, doing) from trouble

    def _endpoint(self, pod: Json) -> Endpoint | None:
        """Where its own sshd answers. The vendor's proxy carries no commands."""
        direct = (pod.get("ssh") or {}).get("direct")
        if not direct:
            return None
        return Endpoint(str(direct["host"]), int(direct["port"]), self._settings.ssh.user or str(direct["username"]))


def _state(pod: Json, status: str) -> MachineState:
    if status in _EXITED:
        return MachineState.EXITED
    # RUNNING without a runtime is a promise. What nobody knows is not gone.
    is_running = status == "RUNNING" and pod.get("runtime") is not None
    return MachineState.RUNNING if is_running else MachineState.BOOTING


def _within(second: datetime | None, moment: datetime) -> datetime:
    """When a pod was ended: by our clock, but in the second that the vendor's clock showed. Each second is paid for, so
    neither what the answer's way took nor a clock that is wrong may add one."""
    if second is None:
        return moment
    return min(max(moment, second), second + timedelta(seconds=1) - timedelta.resolution)


def _volume(answer: Json, doing: str) -> Volume:
    try:
        return Volume(str(answer["id"]), int(answer["size"]))
    except (KeyError, TypeError, ValueError):
        raise Unavailable(f"{doing}: an answer that cannot be read") from None


def _moment(value: Any) -> datetime | None:
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
