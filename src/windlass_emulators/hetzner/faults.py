"""Fault injection for the emulated Hetzner project.

`faults.next_create(times_out_after_taking_effect=True)` and the other `next_*` methods apply to the next matching
request, or to as many as `times` says. Missing capacity, a list lag and a server limit last until withdrawn.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from windlass_emulators.fault_script import DEFAULT_HELD_S, FaultScript, ScriptedFault, Shortage, check_one_outcome
from windlass_emulators.hetzner.errors import STATUS_OF_CODE, HetznerApiError
from windlass_emulators.http import Json

_ONE_SERVER = r"/v1/servers/\d+"
LIMITS = ("server_limit", "dedicated_core_limit", "primary_ip_limit", "network_limit")
# Actions that can fail after they were accepted.
_FALLIBLE_ACTIONS = ("start_server", "attach_to_network", "delete_server")


@dataclass(slots=True)
class BootFault:
    # Delay between `running` and the start of the program.
    extra_s: float = 0.0
    # The program never starts.
    is_dead: bool = False


@dataclass(slots=True)
class ActionFault:
    command: str
    code: str
    times: int


@dataclass
class HetznerFaults(FaultScript):
    boot_faults: list[BootFault] = field(default_factory=list)
    action_faults: list[ActionFault] = field(default_factory=list)
    # By name of the limit, as in the settings of the emulator.
    limits: dict[str, int] = field(default_factory=dict)
    wants_drained_bucket: bool = False

    METHODS = (
        "next", "next_create", "next_delete", "next_list", "burst", "drain_rate_limit", "no_capacity", "capacity",
        "list_lags", "server_limit", "resource_limit", "next_boot", "next_action", "clear",
    )  # fmt: skip

    # -------------------------------------------------------------------------------------------------- next requests

    def next(
        self,
        code: str | None = None,
        *,
        method: str | None = None,
        path: str = ".*",
        message: str | None = None,
        status: int | None = None,
        takes_effect: bool = False,
        held_s: float = DEFAULT_HELD_S,
        times: int = 1,
        skip: int = 0,
        for_s: float | None = None,
    ) -> None:
        """The next `times` requests with this method and path get this error, or no answer without a code.

        `takes_effect` executes the request first. `skip` lets that many matching requests pass. `for_s` expires it.
        """
        if code is not None and code not in STATUS_OF_CODE and status is None:
            raise ValueError(f"{code} is not a published error code; give its status too")
        error = None if code is None else HetznerApiError(code, message or f"{code} (injected)", None, status)
        self._add(ScriptedFault(method, path, error, code, takes_effect, held_s, times, skip), for_s)

    def next_create(
        self,
        code: str | None = None,
        *,
        times_out_after_taking_effect: bool = False,
        times_out_before_taking_effect: bool = False,
        takes_effect: bool = False,
        **options: Any,
    ) -> None:
        """The next creation of a server fails or times out. `options` as for `next`."""
        check_one_outcome(code, times_out_after_taking_effect, times_out_before_taking_effect)
        is_effective = takes_effect or times_out_after_taking_effect
        self.next(code, method="POST", path="/v1/servers", takes_effect=is_effective, **options)

    def next_delete(
        self,
        code: str | None = None,
        *,
        times_out_after_taking_effect: bool = False,
        times_out_before_taking_effect: bool = False,
        takes_effect: bool = False,
        **options: Any,
    ) -> None:
        """The next deletion of a server fails or times out. `next_delete("not_found")` denies an existing server."""
        check_one_outcome(code, times_out_after_taking_effect, times_out_before_taking_effect)
        is_effective = takes_effect or times_out_after_taking_effect
        self.next(code, method="DELETE", path=_ONE_SERVER, takes_effect=is_effective, **options)

    def next_list(self, code: str | None = None, **options: Any) -> None:
        """The next list of servers fails or times out. With `skip=1`, the second page of a list."""
        self.next(code, method="GET", path="/v1/servers", **options)

    def burst(self, times: int = 5, code: str = "unavailable", for_s: float | None = None) -> None:
        """The next `times` requests of any kind fail, by default with 503."""
        self.next(code, times=times, for_s=for_s)

    def drain_rate_limit(self) -> None:
        """Use up all requests of the hour. One per second becomes available again."""
        self.wants_drained_bucket = True

    # ------------------------------------------------------------------------------------------------ lasting faults

    def no_capacity(
        self,
        server_type: str,
        location: str,
        *,
        code: str = "resource_unavailable",
        is_announced: bool = True,
        for_s: float | None = None,
    ) -> None:
        """Creations of this type in this location fail with `code`; `*` stands for all."""
        self.shortages[server_type, location] = Shortage(is_announced, self._expiry(for_s), code)

    def capacity(self, server_type: str, location: str) -> None:
        """Withdraw `no_capacity`."""
        self.shortages.pop((server_type, location), None)

    def server_limit(self, limit: int | None) -> None:
        """Maximum number of servers; None restores the setting."""
        self.resource_limit("server_limit", limit)

    def resource_limit(self, name: str, limit: int | None) -> None:
        """Maximum of one kind, one of LIMITS; None restores the setting."""
        if name not in LIMITS:
            raise ValueError(f"{name} is not a limit; use one of {', '.join(LIMITS)}")
        if limit is None:
            self.limits.pop(name, None)
        else:
            self.limits[name] = limit

    # --------------------------------------------------------------------------------------------------- next servers

    def next_boot(self, *, extra_s: float = 0.0, is_dead: bool = False) -> None:
        """The next server that is created starts its program late, or never."""
        self.boot_faults.append(BootFault(extra_s, is_dead))

    def next_action(self, command: str, code: str = "action_failed", *, times: int = 1) -> None:
        """The next actions of this command are accepted and then fail: the server stays off, has no private address, or
        is not deleted. It is billed in each case."""
        if command not in _FALLIBLE_ACTIONS:
            raise ValueError(f"{command} cannot fail here; use one of {', '.join(_FALLIBLE_ACTIONS)}")
        self.action_faults.append(ActionFault(command, code, times))

    def clear(self) -> None:
        super().clear()
        self.boot_faults.clear()
        self.action_faults.clear()
        self.limits.clear()

    # ------------------------------------------------------------------------------------------ for the emulator

    def take_boot_fault(self) -> BootFault:
        return self.boot_faults.pop(0) if self.boot_faults else BootFault()

    def take_action_fault(self, command: str) -> str | None:
        """The error code of an action that starts now, if it is to fail. Uses up one of its `times`."""
        fault = next((each for each in self.action_faults if each.command == command), None)
        if fault is None:
            return None
        fault.times -= 1
        if fault.times <= 0:
            self.action_faults.remove(fault)
        return fault.code

    def shortage(self, server_type: str, location: str) -> Shortage | None:
        return self._find_shortage((server_type, location), (server_type, "*"), ("*", location), ("*", "*"))

    def to_json(self) -> Json:
        return {
            **super().to_json(),
            "no_capacity": [
                {"server_type": kind, "location": place, "code": each.code}
                for (kind, place), each in self.shortages.items()
            ],
            "server_limit": self.limits.get("server_limit"),
            "limits": dict(self.limits),
            "next_boots": [asdict(each) for each in self.boot_faults],
            "next_actions": [asdict(each) for each in self.action_faults],
        }
