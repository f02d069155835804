"""Workers on pods of Runpod.

Guarantees:
- A pod is ours if a tag in its environment names our database, our fleet and a worker, and its name is that worker's.
  Others are neither listed nor touched.
- `create` sends at most one request per choice of GPU, cloud and data centers. A choice without capacity is skipped and
  remembered. A choice that this account may not use is skipped too, and reported in `traits`. If any choice had no
  capacity, the error is NoCapacity, which is temporary, whatever is wrong with the others. A request without a clear
  rejection is Ambiguous, unless no connection was made. If a pod with this name exists, it is adopted.
- `list_machines` is complete or raises (pod_list.py).
- `delete` returns when a pod whose deletion was requested is not found by its id. An accepted deletion is not enough.
  A new pod may be hidden from reads by id, so a complete list must confirm that it is gone. If the deletion itself
  answered "not found", a list must confirm that, and the pod must be older than new pods may be hidden.
- A pod that Runpod placed elsewhere than requested, or where a person excluded it, is listed as misplaced. A locked pod
  is listed as locked, and its deletion is refused without a request.
- A stopped pod is never started again, since its GPUs may be in use by others. It counts as exited.
- `prepare` (with `auto_start_worker`) checks a pod over SSH and starts its worker once (provisioning.py).
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

import structlog

from windlass.model.errors import (
    Ambiguous,
    Denied,
    InvalidRequest,
    LimitReached,
    NoCapacity,
    NotPrepared,
    ProviderError,
    ProviderUnreachable,
    Refused,
    Throttled,
    Unavailable,
)
from windlass.model.machine import Machine, MachineRequest, Preparation, ProviderTraits, Volume
from windlass.model.redaction import mask_known
from windlass.model.runpod import GpuChoice, RunpodSettings
from windlass.model.task import storable
from windlass.model.worker_log import MAX_BOOT_LOG_CHARACTERS
from windlass.ports.provider import OnHostKey
from windlass.providers.runpod import naming
from windlass.providers.runpod.account import Json, RunpodAccount
from windlass.providers.runpod.catalog import CURRENCY, CapacityKey, Offers, order_choices, volume_price
from windlass.providers.runpod.errors import TOKEN_HINT
from windlass.providers.runpod.pod_list import EXITED, LIST_REUSE_S, PodList
from windlass.providers.runpod.provisioning import Preparer
from windlass.providers.runpod.ssh import Endpoint
from windlass.providers.vendor_error import ErrorKind, VendorError

# Each is shorter than the control loop's own limit, so that the error says what is known.
CREATE_TIMEOUT_S = 55.0
DELETE_TIMEOUT_S = 55.0
# Pauses between checks whether a pod is gone. A deletion usually takes a moment.
DELETE_POLL_INTERVALS_S = (0.5, 2.0, 4.0, 8.0, 12.0, 12.0)
# A refused choice is reported for this long, unless it succeeds earlier.
REFUSED_REPORTED_S = 3600.0
# A new pod may not be found by its id for this long.
HIDDEN_S = 60.0
# Last lines of a pod that never joined.
BOOT_LOG_LINES = 200

# The age that a list may have; the vendor promises nothing. A machine that is really gone costs nothing meanwhile.
_ABSENCE_GRACE_S = 60.0
# A gateway times out after a minute while its backend may still create the pod, and then the list may be old.
_CREATION_LATENESS_S = 60.0 + _ABSENCE_GRACE_S
# A pod that was just deleted may still be listed, and a pod of a newer leader before its row is visible.
_ORPHAN_GRACE_S = _ABSENCE_GRACE_S
_PAUSE_S = 5.0
UNLOCK_HINT = "unlock it in Runpod's console. It is billed until then."
# Letters and digits. An id of digits only is a Hetzner server's.
_POD_ID = re.compile(r"[A-Za-z0-9_-]+")
_SKIPPED_KINDS = (ErrorKind.NO_CAPACITY, ErrorKind.FORBIDDEN, ErrorKind.REFUSED)
log = structlog.get_logger(__name__)


class RunpodProvider:
    """The pods of one fleet. `identity` is the database's; fleets with the same key share an `account`. `url` is the
    control plane's, as pods reach it. With a `preparer` and its `public_key`, workers are started over SSH; otherwise
    the image starts them."""

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
        ca_pem: str | None = None,
        list_reuse_s: float = LIST_REUSE_S,
        delete_poll_intervals_s: Sequence[float] = DELETE_POLL_INTERVALS_S,
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
        self._ca_pem = ca_pem
        self._delete_poll_intervals_s = delete_poll_intervals_s
        self._hidden_s = hidden_s
        self._now = now
        self._pods = PodList(fleet, settings, account, self._tag, reuse_s=list_reuse_s, now=now)
        # When a pod was first not found, although no deletion was confirmed.
        self._missing_since: dict[str, datetime] = {}
        # Refused choices: when, and the vendor's message.
        self._refused: dict[GpuChoice, tuple[datetime, str]] = {}
        # By worker: one request for a pod at a time.
        self._creating: dict[str, asyncio.Task[Machine]] = {}

    @property
    def traits(self) -> ProviderTraits:
        return ProviderTraits(
            absence_grace_s=_ABSENCE_GRACE_S,
            creation_lateness_s=_CREATION_LATENESS_S,
            orphan_grace_s=_ORPHAN_GRACE_S,
            billing_unit_s=1,
            is_remote=True,
            key_hash=self._account.key_hash,
            has_prepare_step=self._preparer is not None,
            refused_choices=tuple(
                (str(choice), message)
                for choice, (at, message) in self._refused.items()
                if self._now() - at < timedelta(seconds=REFUSED_REPORTED_S)
            ),
        )

    async def close(self) -> None:
        """Nothing to do: pods keep running, and the account is shared."""

    async def list_machines(self) -> tuple[Machine, ...]:
        return await self._pods.machines()

    async def price(self, machine: Machine) -> Machine:
        return self._pods.with_price(machine, await self._pods.offers())

    # ------------------------------------------------------------------------------------------------------ create

    async def create(self, request: MachineRequest) -> Machine:
        running = self._creating.get(request.name)
        if running is not None:
            return await asyncio.shield(running)
        self._creating[request.name] = task = asyncio.ensure_future(self._create(request))
        try:
            return await task
        finally:
            del self._creating[request.name]

    async def _create(self, request: MachineRequest) -> Machine:
        doing = f"creating pod {request.name}"
        body = naming.pod_body(
            request, self._settings, self._tag, url=self._url, public_key=self._public_key, ca_pem=self._ca_pem
        )
        deadline = asyncio.get_running_loop().time() + CREATE_TIMEOUT_S
        try:
            # Names need not be unique, so no pod is created before a list shows that none exists.
            async with asyncio.timeout_at(deadline):
                found = await self._pods.find(request.name)
                if found is not None:
                    return found
                offers = await self._pods.offers()
        except TimeoutError:
            raise ProviderUnreachable(f"{doing}: no list of pods within {CREATE_TIMEOUT_S:g} s", _PAUSE_S) from None
        except VendorError as error:
            if error.kind in (ErrorKind.LOST, ErrorKind.UNSENT):
                # Nothing was sent that could create a pod.
                raise ProviderUnreachable(f"{doing}: no list of pods ({error})", _PAUSE_S) from error
            raise self._creation_error(error, doing) from error
        try:
            async with asyncio.timeout_at(deadline):
                pod = await self._request_pod(body, offers, doing)
        except TimeoutError:
            raise Ambiguous(f"{doing}: no response within {CREATE_TIMEOUT_S:g} s") from None
        machine = self._pods.to_machine(pod, offers)
        self._pods.changes.record(machine.id, machine)
        if machine.misplaced is not None:
            log.warning("find misplaced pod", fleet=self._fleet, pod=machine.id, place=machine.place, host=machine.host)
        return machine

    async def _request_pod(self, body: Json, offers: Offers, doing: str) -> Json:
        """Try each choice. An error that may not apply to another choice is kept until all were tried."""
        choices = self._settings.ordered
        exhausted = [choice for choice in choices if self._account.is_exhausted(self._capacity_key(choice))]
        refused: list[tuple[GpuChoice, VendorError]] = []
        for choice in order_choices(choices, exhausted, offers):
            try:
                location = naming.location_body(choice, self._settings)
                pod = await self._account.request("POST", "/pods", {**body, **location})
            except VendorError as error:
                if error.kind not in _SKIPPED_KINDS:
                    raise self._creation_error(error, doing) from error
                if error.kind is not ErrorKind.NO_CAPACITY:
                    log.warning("skip choice", fleet=self._fleet, choice=str(choice), error=str(error))
                    refused.append((choice, error))
                    continue
                log.info("find no capacity", fleet=self._fleet, choice=str(choice), error=str(error))
                exhausted.append(choice)
                self._account.record_no_capacity(self._capacity_key(choice), self._settings.capacity_memory_s)
            else:
                if not pod.get("id"):
                    raise Ambiguous(f"{doing}: the response has no pod id")
                self._refused.pop(choice, None)
                self._refused |= {each: (self._now(), str(error)) for each, error in refused}
                if self._pods.to_machine(pod, offers).misplaced is not None:
                    # The data centers of a request are only preferred. Other choices come first for a while.
                    self._account.record_no_capacity(self._capacity_key(choice), self._settings.capacity_memory_s)
                return pod
        if not exhausted:
            raise self._creation_error(refused[-1][1], doing)
        self._refused |= {each: (self._now(), str(error)) for each, error in refused}
        lacking = ", ".join(str(choice) for choice in choices if choice in exhausted)
        advice = f"Wait, or add choices to runpod.choices of fleet {self._fleet}."
        reasons = [f" Refused: {choice} ({error})." for choice, error in refused]
        raise NoCapacity(f"{doing}: no capacity for {lacking}. {advice}{''.join(reasons)}")

    def _capacity_key(self, choice: GpuChoice) -> CapacityKey:
        settings = self._settings
        return CapacityKey(choice, settings.gpu_count, settings.min_cuda_version, settings.network_volume_id)

    def _creation_error(self, error: VendorError, doing: str) -> ProviderError:
        message = f"{doing}: {error}"
        match error.kind:
            case ErrorKind.LIMIT:
                return LimitReached(f"{message}: add funds to the Runpod account.")
            case ErrorKind.DENIED:
                return Denied(f"{message}: {TOKEN_HINT}.")
            case ErrorKind.FORBIDDEN:
                return Denied(
                    f"{message}: the key lacks a permission, or the account may not use this choice. Check "
                    f"runpod_api_key, and runpod.choices of fleet {self._fleet}."
                )
            case ErrorKind.THROTTLED:
                return self._throttled(error, message)
            case ErrorKind.UNSENT:
                return ProviderUnreachable(message, _PAUSE_S)
            case ErrorKind.LOST:
                return Ambiguous(message)
            case _:
                return InvalidRequest(f"{message}: check the runpod settings of fleet {self._fleet}.")

    def _throttled(self, error: VendorError, message: str) -> Throttled:
        return Throttled(message, error.retry_after_s or max(self._account.limiter.pause_s, _PAUSE_S))

    async def boot_log(self, machine: Machine) -> str:
        """What the pod printed, while it exists."""
        doing = f"reading the log of pod {machine.id} of {machine.name}"
        try:
            lines = await self._account.pod_log(machine.id, BOOT_LOG_LINES)
        except VendorError as error:
            raise Unavailable(f"{doing}: {error}") from error
        return storable(mask_known("\n".join(lines)))[-MAX_BOOT_LOG_CHARACTERS:]

    # ------------------------------------------------------------------------------------------------------ delete

    async def delete(self, machine: Machine) -> datetime | None:
        """Returns when the deletion was accepted, which ends the billing. None if it was not our deletion."""
        doing = f"deleting pod {machine.id} of {machine.name}"
        if not _POD_ID.fullmatch(machine.id) or machine.id.isdecimal():
            raise Refused(f"{doing}: not a pod id. Delete the machine at the fleet's former provider.")
        try:
            async with asyncio.timeout(DELETE_TIMEOUT_S):
                return await self._delete(machine, doing)
        except TimeoutError:
            raise Unavailable(f"{doing}: the pod still exists after {DELETE_TIMEOUT_S:g} s") from None
        except VendorError as error:
            message = f"{doing}: {error}"
            if error.is_denied:
                raise Denied(f"{message}: {TOKEN_HINT}. The pod is billed until then.") from error
            if error.kind is ErrorKind.THROTTLED:
                raise self._throttled(error, message) from error
            raise Unavailable(message) from error

    async def _delete(self, machine: Machine, doing: str) -> datetime | None:
        if self._pods.changes.is_deleted(machine.id):
            return None
        if machine.id not in self._pods.changes:
            # A pod that is not found may be new and ours. It is deleted too, since ids are never reused.
            pod = self._account.last_listed(machine.id) or await self._account.get_pod(machine.id)
            if pod is not None and pod.get("locked"):
                raise Refused(f"{doing}: the pod is locked: {UNLOCK_HINT}")
            if pod is not None and naming.tagged_worker(pod, self._tag) is None:
                raise Refused(
                    f"{doing}: the pod has lost our tag. Terminate it in Runpod's console, or restore its "
                    "environment. It is billed until then."
                )
        accepted_at: datetime | None = None
        last_error = ""
        for interval_s in self._delete_poll_intervals_s:
            requested_at = asyncio.get_running_loop().time()
            try:
                answered_at = await self._account.delete_pod(machine.id)
                # After the response: waiting for a free request is not the pod's end.
                accepted_at = _clamp_to_second(self._now(), answered_at)
            except VendorError as error:
                if error.kind is ErrorKind.PROTECTED:
                    raise Refused(f"{doing}: {error}: {UNLOCK_HINT}") from error
                # Not found, a temporary state, no connection or no response: check whether it is gone.
                if error.kind not in (ErrorKind.NOT_FOUND, ErrorKind.BUSY, ErrorKind.LOST, ErrorKind.UNSENT):
                    raise
                last_error = f" ({error})"
            await asyncio.sleep(interval_s)
            if await self._confirm_gone(machine, requested_at, is_accepted=accepted_at is not None):
                self._pods.changes.record(machine.id, None)
                self._missing_since.pop(machine.id, None)
                return accepted_at
        raise Unavailable(f"{doing}: the pod still exists, or its end is not confirmed yet{last_error}")

    async def _confirm_gone(self, machine: Machine, requested_at: float, *, is_accepted: bool) -> bool:
        if await self._account.get_pod(machine.id) is not None:
            self._missing_since.pop(machine.id, None)
            return False
        if is_accepted and self._record_missing(machine):
            return True
        # A new pod may not be found by its id although it exists, even after its deletion was accepted.
        listing = await self._account.list_pods(requested_at)
        if any(str(pod["id"]) == machine.id for pod in listing.pods):
            return False
        # Neither found nor listed. Without an accepted deletion, a new pod may be hidden from both.
        return is_accepted or self._record_missing(machine)

    def _record_missing(self, machine: Machine) -> bool:
        """Record that the pod was not found. True if it is old enough to be found if it exists."""
        since = machine.created_at or self._missing_since.setdefault(machine.id, self._now())
        return self._now() - since >= timedelta(seconds=self._hidden_s)

    # ----------------------------------------------------------------------------------------------------- prepare

    async def prepare(self, machine: Machine, host_key: str | None, on_host_key: OnHostKey) -> Preparation:
        if self._preparer is None:
            return Preparation()
        name = f"pod {machine.id} of {machine.name}"

        async def find_endpoint() -> Endpoint | None:
            listing = await self._pods.recent()
            pod = next((pod for pod in listing.pods if str(pod["id"]) == machine.id), None)
            if pod is None and self._record_missing(machine):
                # A list may be old. A pod that is neither listed nor found by its id is gone.
                pod = await self._account.get_pod(machine.id)
                if pod is None:
                    raise NotPrepared("MACHINE_GONE", f"preparing {name}: the pod is gone", host_key=host_key)
            if pod is not None and pod.get("status") in EXITED:
                raise NotPrepared("MACHINE_GONE", f"preparing {name}: {EXITED[pod['status']]}", host_key=host_key)
            return self._pods.endpoint(pod) if pod is not None else None

        listed = self._account.last_listed(machine.id)
        last_known = self._pods.endpoint(listed) if listed is not None else None
        return await self._preparer.prepare(name, find_endpoint, host_key, on_host_key, last_known)

    # ----------------------------------------------------------------------------------------------------- storage

    async def volume(self) -> Volume | None:
        volume_id = self._settings.network_volume_id
        if volume_id is None:
            return None
        doing = f"reading network volume {volume_id}"
        try:
            return _read_volume(await self._account.read(f"/network-volumes/{volume_id}"), doing)
        except VendorError as error:
            raise Unavailable(f"{doing}: {error}") from error

    async def grow_volume(self, volume_id: str, size_gb: int) -> Volume:
        doing = f"growing network volume {volume_id} to {size_gb} GB"
        path = f"/network-volumes/{volume_id}"
        try:
            found = _read_volume(await self._account.read(path), doing)
            if found.size_gb >= size_gb:
                return found
            # The request names the new size, so repeating it has no further effect.
            return _read_volume(await self._account.request("PATCH", path, {"size": size_gb}), doing)
        except VendorError as error:
            raise self._creation_error(error, doing) from error


def _clamp_to_second(time: datetime, second: datetime | None) -> datetime:
    """Our time, moved into the second that the vendor's clock showed. Pods are billed by the second, so neither network
    latency nor our wrong clock may add one."""
    if second is None:
        return time
    return min(max(time, second), second + timedelta(seconds=1) - timedelta.resolution)


def _read_volume(response: Json, doing: str) -> Volume:
    try:
        size_gb = int(response["size"])
        price = volume_price(size_gb, is_fast=response.get("type") == "HIGH_PERFORMANCE")
        return Volume(str(response["id"]), size_gb, price, CURRENCY)
    except (KeyError, TypeError, ValueError):
        raise Unavailable(f"{doing}: unreadable response") from None
