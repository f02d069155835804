"""The simulated world with Hetzner in it: the real control loop over the real provider, SDK and emulated API.

The emulator's servers are the machines in the cloud's books, with the simulated workers in them. The books check the
servers: never too many, no worker terminated without cause, nothing left over.
Faults of each request are drawn
from the scenario's rates. Primary IPs must not be left over either. Each start of an orchestrator has an account and
a provider of its own, as a process would.

What servers cost is the emulator's own bill: ours must be the same to the micro at the end, and no server may be
deleted in the first 80 % of an hour that is billed without a cause.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from random import Random
from typing import Any
from urllib.parse import parse_qs, urlsplit

import requests

from support.hetzner_contract import InProcessTransport
from support.hetzner_fixture import ENDPOINT, PUBLIC_ONLY, TIMEOUT_S, Network
from support.simulator.cloud import MachineRecord, SimulatedCloud
from support.simulator.invariants import MIN_USED_SHARE
from support.simulator.loop import EPOCH, to_datetime, virtual_now
from support.simulator.orchestrators import ProcessProvider, SimulatedOrchestrator
from support.simulator.scenario import FleetScenario, Scenario, draw_billed_scenario, draw_scenario
from support.simulator.simulation import Simulation
from support.simulator.workers import SimulatedWorker, WorkerFaults
from windlass.model.hetzner import HOUR_S, HetznerSettings
from windlass.model.machine import MachineRequest
from windlass.providers.hetzner.account import HetznerAccount
from windlass.providers.hetzner.provider import HetznerProvider
from windlass_emulators.hetzner import HetznerEmulator
from windlass_emulators.hetzner.settings import HetznerEmulatorSettings

# What the provider's traits allow for: how old a list may be, and how late a server may come.
MAX_LIST_AGE_S = 30.0
MAX_LATE_S = 90.0
# By then a list has shown a new server, and its addresses have labels.
LISTED_BY = timedelta(minutes=10)
_ONE_SERVER = re.compile(r"/v1/servers/(\d+)")

REFUSALS = (
    "resource_limit_exceeded", "resource_unavailable", "placement_error", "rate_limit_exceeded", "conflict", "locked",
    "maintenance", "forbidden", "invalid_input",
)  # fmt: skip
NO_ANSWERS = ("server_error", "unavailable", "timeout", "bad_gateway", None)
NOT_DELETED = ("not_found", "locked", "conflict", "protected", "forbidden", "rate_limit_exceeded", *NO_ANSWERS)


def hetzner_scenario(seed: int) -> Scenario:
    """The faults of any scenario, with the timeouts that this vendor's lists require.

    Half of the scenarios span several billing hours. Their hours are shorter, and tasks arrive in waves.
    """
    scenario = draw_billed_scenario(seed) if seed % 2 else draw_scenario(seed)
    return replace(
        scenario, fleets={name: on_hetzner(fleet_scenario) for name, fleet_scenario in scenario.fleets.items()}
    )


def on_hetzner(fleet_scenario: FleetScenario) -> FleetScenario:
    """The fleet with the traits of this vendor."""
    settings = {
        "provider": "hetzner",
        "policy": "clear-time",
        "spawn_timeout_s": 90.0,
        "poll_interval_s": max(5.0, fleet_scenario.config.poll_interval_s),
    }
    return replace(
        fleet_scenario,
        config=fleet_scenario.config.model_copy(update=settings),
        # The simulation waits for deletions by the cloud's traits, so they must equal the provider's.
        max_list_age_s=60.0,
        max_creation_delay_s=MAX_LATE_S + 60.0,
        billing_unit_s=fleet_scenario.billing_unit_s if fleet_scenario.billing_unit_s > 1 else HOUR_S,
        # Unused: the emulator has its own prices.
        price_micros_per_hour=1,
        price_micros_per_month=None,
    )


class HetznerCloud(SimulatedCloud):
    """The bill of one fleet in an emulated project."""

    project: "Project"

    def remove_machine(self, machine_id: str) -> None:
        self.project.vanish(machine_id)
        super().remove_machine(machine_id)

    def mark_exited(self, machine_id: str) -> None:
        self.project.turn_off(machine_id)
        super().mark_exited(machine_id)

    def cost_micros(self, entry: MachineRecord, until: datetime) -> int:
        """The emulator's bill, as if the server had ended at that time.

        An address that outlives its server by a manual change costs more; the control loop cannot know that.
        """
        ledger = self.project.emulator.ledger
        lines = [line for line in ledger._lines.values() if entry.id in (f"{line.id}", f"{line.made_with}")]
        return sum(ledger._micros(line, until, is_gross=False) for line in lines)


class Project(InProcessTransport):
    """The emulated project, its faults, and the worker of each server."""

    def __init__(self, clouds: dict[str, HetznerCloud], hour_s: int, rng: Random) -> None:
        settings = HetznerEmulatorSettings(boot_s=rng.choice([0.0, 4.0, 8.0]), billing_hour_s=hour_s)
        self.emulator = HetznerEmulator(virtual_now, settings)
        super().__init__(self.emulator)
        self.clouds = clouds
        self.rng = rng
        self.faults_ended = False
        self.entries: dict[int, MachineRecord] = {}
        self.faults_seen: set[str] = set()

    # -------------------------------------------------------------------------------------------------- requests

    def send(self, request: requests.PreparedRequest, *_: Any, **options: Any) -> requests.Response:
        method, path = request.method or "", urlsplit(request.url or "").path
        cloud = self._cloud_of(request, method, path)
        lag_s, self.emulator.faults.lag_s = self.emulator.faults.lag_s, 0.0
        # The script was meant for a request that was refused.
        self.emulator.faults.action_faults.clear()
        breaks = self._draw(method, path, cloud) if cloud is not None and not self.faults_ended else None
        if breaks == "late":
            delay_s = self.rng.uniform(0.0, MAX_LATE_S)
            asyncio.get_running_loop().call_later(delay_s, lambda: self._arrive(request, options))
            raise requests.exceptions.ReadTimeout("no answer")
        try:
            response = super().send(request, **options)
        finally:
            self.emulator.faults.lag_s = lag_s
            self.update_records()
        if breaks == "answer lost":
            raise requests.exceptions.ConnectionError("Connection reset by peer")
        return response

    def _arrive(self, request: requests.PreparedRequest, options: dict[str, Any]) -> None:
        super().send(request, **options)
        self.update_records()

    def _cloud_of(self, request: requests.PreparedRequest, method: str, path: str) -> HetznerCloud | None:
        if method == "POST" and path == "/v1/servers":
            cloud = self.clouds[json.loads(request.body or "{}")["labels"]["windlass-fleet"]]
            cloud.create_calls += 1
            return cloud
        if one := _ONE_SERVER.fullmatch(path):
            entry = self.entries.get(int(one[1]))
            if entry is not None and method == "DELETE":
                self.clouds[entry.fleet].delete_calls += 1
                if int(one[1]) in self.emulator.project.servers:
                    self.clouds[entry.fleet].on_delete_requested(entry)
            return self.clouds[entry.fleet] if entry is not None else None
        selector = parse_qs(urlsplit(request.url or "").query).get("label_selector", [""])[0]
        found = re.search(r"windlass-fleet=(\w+)", selector)
        return self.clouds[found[1]] if found else next(iter(self.clouds.values()))

    def _draw(self, method: str, path: str, cloud: HetznerCloud) -> str | None:
        """Script the response to this request, or return the network fault that it meets."""
        rng, rates, roll = self.rng, cloud.rates, self.rng.random()
        if method == "POST":
            if roll < rates.create_ambiguous:
                kind = rng.choice(["late", "answer lost", "silence", "silence after", "5xx", "5xx after"])
                if not cloud.allow("create_ambiguous"):
                    return None
                if kind not in ("late", "answer lost"):
                    return self._script(method, path, kind, cloud)
                self.faults_seen.add(kind)
                cloud.trace.add("hetzner", f"{method} {path}: {kind}")
                return kind
            if roll < rates.create_ambiguous + rates.create_refused:
                refusal = rng.choice(REFUSALS)
                kind = "create_throttled" if refusal == "rate_limit_exceeded" else "create_refused"
                return self._script(method, path, refusal, cloud) if cloud.allow(kind) else None
            if roll > 1 - rates.create_ambiguous / 2:
                self._fail_action("start_server", cloud)
        elif method == "DELETE":
            if roll > 1 - rates.delete_failed / 4:
                self._fail_action("delete_server", cloud)
            elif roll < rates.delete_failed:
                code = rng.choice(NOT_DELETED)
                is_lost = code in NO_ANSWERS
                after = " after" if is_lost and rng.random() < 0.5 else ""
                kind = ("silence" if code is None else code) + after
                return self._script(method, path, kind, cloud) if cloud.allow("delete_failed") else None
        elif roll < rates.list_failed / (1 if path == "/v1/servers" else 3):
            kind = rng.choice(["silence", "5xx", "rate_limit_exceeded"])
            return self._script(method, path, kind, cloud) if cloud.allow("list_failed") else None
        elif path == "/v1/servers" and rng.random() < rates.list_stale:
            lag_s = rng.uniform(0.0, MAX_LIST_AGE_S)
            if cloud.allow("list_stale"):
                self.emulator.faults.lag_s = lag_s
                self.faults_seen.add("list old")
        return None

    def _fail_action(self, command: str, cloud: HetznerCloud) -> None:
        """The request succeeds, but its action has no effect."""
        if not cloud.allow("action_failed"):
            return
        self.faults_seen.add(f"{command} failed")
        cloud.trace.add("hetzner", f"{command} is accepted and fails")
        self.emulator.faults.next_action(command)

    def never_starts(self, machine_id: str) -> bool:
        about = ("server", int(machine_id))
        actions = self.emulator.project.actions.values()
        return any(each.command == "start_server" and each.error and about in each.resources for each in actions)

    def _script(self, method: str, path: str, kind: str, cloud: HetznerCloud) -> str | None:
        """Script the answer to the next such request. Returns None: the network has no fault."""
        word, _, after = kind.partition(" ")
        code = {"silence": None, "5xx": self.rng.choice(["server_error", "unavailable", "timeout", "bad_gateway"])}.get(
            word, word
        )
        self.faults_seen.add(f"{method} {kind}")
        cloud.trace.add("hetzner", f"{method} {path}: {kind}")
        self.emulator.faults.next(code, method=method, path=re.escape(path), takes_effect=bool(after))
        return None

    # ----------------------------------------------------------------------------------------------------- books

    def update_records(self) -> None:
        """Record servers that began or ended, now and at the next event of the emulator."""
        self.emulator.settle()
        servers = self.emulator.project.servers
        for id_, server in servers.items():
            if id_ not in self.entries:
                labels = server.labels
                request = MachineRequest(
                    labels["windlass-worker"], labels["windlass-fleet"], int(labels["windlass-slot"])
                )
                self.entries[id_] = self.clouds[request.fleet].add_machine(request, machine_id=str(id_))
        for id_, entry in self.entries.items():
            if id_ not in servers:
                SimulatedCloud.remove_machine(self.clouds[entry.fleet], entry.id)
        due = self.emulator.next_due()
        if due is not None:
            asyncio.get_running_loop().call_at((due - to_datetime(0)).total_seconds() + 1e-6, self._update_again)

    def _update_again(self) -> None:
        due = self.emulator.next_due()
        if due is not None and due <= virtual_now():
            self.update_records()

    def vanish(self, machine_id: str) -> None:
        """The vendor lost the server, or a person deleted it in the console."""
        for id_, entry in self.entries.items():
            server = self.emulator.project.servers.get(id_)
            if entry.id == machine_id and server is not None:
                self.emulator.settle()
                if self.rng.random() < 0.5:  # in the console, so there is an action
                    self.emulator.project.act("delete_server", [("server", id_)], 0.0)
                self.emulator.project.begin_deletion(server)
                self.emulator.project.remove_server(server)
                server.power_changes += 1  # cancels pending power actions

    def turn_off(self, machine_id: str) -> None:
        for id_, entry in self.entries.items():
            server = self.emulator.project.servers.get(id_)
            if entry.id == machine_id and server is not None:
                self.emulator.settle()
                self.emulator.project.power_off(server, 0.0)

    def forget_an_address(self) -> None:
        """A person turns off the automatic deletion of a Primary IP, labelled or not.

        Not of a new one without labels: it is lost if its server is deleted before a list shows it
        (docs/provider-hetzner.md).
        """
        addresses = list(self.emulator.project.primary_ips.values())
        chosen = self.rng.choice(addresses) if addresses else None
        is_lost = chosen is not None and not chosen.labels and virtual_now() - chosen.created < LISTED_BY
        if chosen is not None and not is_lost and next(iter(self.clouds.values())).allow("address_kept"):
            chosen.is_auto_deleted = False
            self.faults_seen.add("forgotten address")

    def bill(self) -> Any:
        """The emulator's clock, also after the end of the simulation."""
        return self.emulator.ledger.to_json(self.emulator.project.now)

    def take_over_times(self) -> None:
        """After the end: record the billed interval of each server by the emulator."""
        for id_, entry in self.entries.items():
            line = self.emulator.ledger._lines["server", id_]
            entry.created_at = (line.started - EPOCH).total_seconds()
            if line.ended is not None:
                entry.deleted_at = (line.ended - EPOCH).total_seconds()


def check_not_deleted_early(history: "HetznerHistory", entry: MachineRecord) -> None:
    """A server deleted in the first 80 % of a billing hour must not have been drained for idleness in that hour.

    A drain late in the hour before, whose deletion was delayed by faults, is allowed. Deletions without a drain are
    checked by the invariants of all simulations.
    """
    server = history.project.emulator.project.servers[int(entry.id)]
    hour_s, age_s = history.hour_s, (virtual_now() - server.created).total_seconds()
    idle_drain_at = history.checker.idle_drain_at.get(entry.name)
    is_early = age_s % hour_s < MIN_USED_SHARE * hour_s and history.checker.has_billing_rules
    if idle_drain_at is None:
        history.deletion_reasons[entry.id] = "failed, " + ("early in an hour" if is_early else "late in an hour")
        return
    history.deletion_reasons[entry.id] = "idle, " + ("delayed by faults" if is_early else "at the end of an hour")
    drained_after_s = (to_datetime(idle_drain_at) - server.created).total_seconds()
    if is_early and drained_after_s // hour_s == age_s // hour_s:
        history.report_violation(f"{entry.name} is deleted {age_s % hour_s:.0f} s into a billed hour without a reason")


class HetznerHistory(Simulation):
    """`on_deletion` is called with each server before a requested deletion."""

    project: Project
    hour_s: int
    # Cause of the last deletion request of each server.
    deletion_reasons: dict[str, str]
    on_deletion: Callable[["HetznerHistory", MachineRecord], None] = staticmethod(check_not_deleted_early)

    @property
    def tally(self) -> Counter[str]:
        return Counter(self.deletion_reasons.values())

    def _build(self) -> None:
        self.wrap_service = self._replace_provider
        super()._build()
        clouds = {name: cloud for name, cloud in self.clouds.items() if isinstance(cloud, HetznerCloud)}
        self.deletion_reasons = {}
        # A project has one billing unit, so all fleets of a scenario share it.
        (self.hour_s,) = {cloud.billing_unit_s for cloud in clouds.values()}
        self.project = Project(clouds, self.hour_s, self.rng_for("hetzner"))
        for cloud in clouds.values():
            cloud.project = self.project
            cloud.on_delete_requested = self._ends
        self.schedule(0.0, self._forget_addresses)

    def _make_cloud(self, name: str, fleet_scenario: FleetScenario) -> SimulatedCloud:
        usual = super()._make_cloud(name, fleet_scenario)
        cloud = HetznerCloud(
            name,
            usual.rng,
            self.trace,
            usual.max_list_age_s,
            usual.max_creation_delay_s,
            usual.price_micros_per_hour,
            billing_unit_s=usual.billing_unit_s,
            rates=usual.rates,
            decisions=usual.decisions,
        )
        cloud.on_created, cloud.on_delete_requested = usual.on_created, usual.on_delete_requested
        cloud.start_worker = lambda entry: self._start_worker(cloud, fleet_scenario, entry)
        return cloud

    def _start_worker(
        self, cloud: SimulatedCloud, fleet_scenario: FleetScenario, entry: MachineRecord
    ) -> SimulatedWorker:
        if self.project.never_starts(entry.id):
            self.scripted_faults.appendleft(WorkerFaults(never_joins=True))
        return super()._start_worker(cloud, fleet_scenario, entry)

    def _ends(self, entry: MachineRecord) -> None:
        self.checker.on_delete_requested(entry)
        self.on_deletion(self, entry)

    def _replace_provider(self, orchestrator: SimulatedOrchestrator, service: Any) -> Any:
        if not isinstance(service, ProcessProvider):
            return service
        fleet = service.provider.fleet  # type: ignore[attr-defined] # the bare cloud
        rng = self.rng_for(f"{orchestrator.name} {self.now()}")
        account = HetznerAccount(
            "any",
            endpoint=ENDPOINT,
            timeout_s=TIMEOUT_S,
            run=Network(rng),
            adapter=self.project,
            rng=rng,
        )
        # Reading proxy settings from the environment takes longer than the emulator's response.
        account.api._client._session.trust_env = False
        provider = HetznerProvider(
            fleet,
            HetznerSettings(**PUBLIC_ONLY, capacity_memory_s=60.0, billing_hour_s=self.hour_s),
            account,
            identity="this",
            render_user_data=lambda request: f"#cloud-config\n# {request.name}\n",
            now=virtual_now,
        )
        return ProcessProvider(provider, service.process)

    async def _forget_addresses(self) -> None:
        while not self.faults_ended:
            self.project.forget_an_address()
            await asyncio.sleep(self._rng.expovariate(1 / 120))

    async def _end_faults(self) -> None:
        self.project.faults_ended = True
        await super()._end_faults()

    async def _audit_costs(self, faults_ended_at: float) -> int:
        self.project.update_records()
        self.project.take_over_times()
        return await super()._audit_costs(faults_ended_at)

    async def _find_leak(self) -> str | None:
        self.project.update_records()
        for address in self.project.emulator.project.primary_ips.values():
            if address.server_id is None:
                return f"Primary IP {address.id} is billed and no server has it"
        return await super()._find_leak()

    async def _find_unrest(self) -> str | None:
        """A server whose worker ended, is late, or hung before the faults ended may still be replaced."""
        for cloud in self.clouds.values():
            for entry in cloud.billed_machines():
                worker = self.checker.workers_by_machine[entry.id]
                has_heartbeats = worker.history.first_heartbeat_at is not None
                if worker.process.is_dead or worker.process.is_frozen or not has_heartbeats:
                    return f"no live worker in {entry.id} of {entry.name}"
        return await super()._find_unrest()
