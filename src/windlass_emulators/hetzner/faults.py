"""Trouble on script: what the API does wrong, when, and how often.

`faults.next_create(times_out_after_taking_effect=True)` and its kin count requests: the first matching one uses a fault
up (or its one of `times`). Shortages, a lagging list and a server limit last until they are taken back or run out.
Every method can also be called over HTTP, by its name and arguments (see docs/emulators.md).
"""

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from windlass_emulators.fault_script import DEFAULT_HELD_S, Script, Scripted, check_one
from windlass_emulators.hetzner.errors import STATUS_OF_CODE, HetznerApiError
from windlass_emulators.http import Json

_ONE_SERVER = r"/v1/servers/\d+"


@dataclass(frozen=True, slots=True)
class HetznerShortage:
    code: str
    # Whether the server type's `available` says so too. It is a hint, and sometimes late.
    is_announced: bool
    until: datetime | None


@dataclass(slots=True)
class BootTrouble:
    extra_s: float
    is_dead: bool


# Actions that can fail, with what they leave undone.
_FALLIBLE = ("start_server", "attach_to_network", "delete_server")


@dataclass(slots=True)
class ActionTrouble:
    command: str
    code: str
    times: int


@dataclass
class HetznerFaults:
    now: datetime
    script: Script = field(default_factory=Script)
    shortages: dict[tuple[str, str], HetznerShortage] = field(default_factory=dict)
    boot_troubles: list[BootTrouble] = field(default_factory=list)
    action_troubles: list[ActionTrouble] = field(default_factory=list)
    lag_s: float = 0.0
    server_limit_override: int | None = None
    wants_drained_bucket: bool = False

    # ------------------------------------------------------------------------------------------ the next requests

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
        """The next `times` requests of this method to a path that matches wholly are answered with this error code,
        or by nobody if there is none; before they have an effect, or after. `for_s` lets it end by time."""
        if code is not None and code not in STATUS_OF_CODE and status is None:
            raise ValueError(f"{code} is no published error code; give its status too")
        error = None if code is None else HetznerApiError(code, message or f"{code} (on script)", None, status)
        until = None if for_s is None else self.now + timedelta(seconds=for_s)
        self.script.add(Scripted(method, path, error, code, takes_effect, held_s, times, skip, until))

    def next_create(
        self,
        code: str | None = None,
        *,
        times_out_after_taking_effect: bool = False,
        times_out_before_taking_effect: bool = False,
        takes_effect: bool = False,
        times: int = 1,
        skip: int = 0,
        held_s: float = DEFAULT_HELD_S,
    ) -> None:
        """The next creation of a server is refused, or nobody answers it."""
        check_one(code, times_out_after_taking_effect, times_out_before_taking_effect)
        is_effective = takes_effect or times_out_after_taking_effect
        self.next(
            code, method="POST", path="/v1/servers", takes_effect=is_effective, times=times, skip=skip, held_s=held_s
        )

    def next_delete(
        self,
        code: str | None = None,
        *,
        times_out_after_taking_effect: bool = False,
        times_out_before_taking_effect: bool = False,
        takes_effect: bool = False,
        times: int = 1,
        skip: int = 0,
        held_s: float = DEFAULT_HELD_S,
    ) -> None:
        """The same for the deletion of a server: `next_delete("not_found")` denies one that is there."""
        check_one(code, times_out_after_taking_effect, times_out_before_taking_effect)
        is_effective = takes_effect or times_out_after_taking_effect
        self.next(
            code, method="DELETE", path=_ONE_SERVER, takes_effect=is_effective, times=times, skip=skip, held_s=held_s
        )

    def next_list(self, code: str | None = None, *, times: int = 1, skip: int = 0, held_s: float = 30.0) -> None:
        """The same for a list of servers. With `skip=1`, the second page of a list."""
        self.next(code, method="GET", path="/v1/servers", times=times, skip=skip, held_s=held_s)

    def burst(self, times: int = 5, code: str = "unavailable", for_s: float | None = None) -> None:
        """Whatever is asked next fails this often, with a 5xx by default."""
        self.next(code, times=times, for_s=for_s)

    def drain_rate_limit(self) -> None:
        """As if all requests of the hour had been made: one a second comes back."""
        self.wants_drained_bucket = True

    # ------------------------------------------------------------------------------------------ states of the cloud

    def no_capacity(
        self,
        server_type: str,
        location: str,
        *,
        code: str = "resource_unavailable",
        is_announced: bool = True,
        for_s: float | None = None,
    ) -> None:
        """There are no more of this type in this place; `*` stands for all. Or `code="placement_error"`."""
        until = None if for_s is None else self.now + timedelta(seconds=for_s)
        self.shortages[server_type, location] = HetznerShortage(code, is_announced, until)

    def capacity(self, server_type: str, location: str) -> None:
        """There are some again."""
        self.shortages.pop((server_type, location), None)

    def list_lags(self, by_s: float) -> None:
        """Lists of servers and Primary IPs show what was true this long ago. Single ones are always up to date."""
        self.lag_s = by_s

    def server_limit(self, limit: int | None) -> None:
        """How many servers the project may have; None: as many as in the settings."""
        self.server_limit_override = limit

    def next_boot(self, *, extra_s: float = 0.0, is_dead: bool = False) -> None:
        """The next server to be created takes longer until its program starts, or it runs and never starts it."""
        self.boot_troubles.append(BootTrouble(extra_s, is_dead))

    def next_action(self, command: str, code: str = "action_failed", *, times: int = 1) -> None:
        """The next actions of this command are accepted and fail: a server that was to start is off, one that was to
        be in a network is not, one that was to be deleted is still there. All of them are paid for."""
        if command not in _FALLIBLE:
            raise ValueError(f"{command} does not fail here; only {', '.join(_FALLIBLE)}")
        self.action_troubles.append(ActionTrouble(command, code, times))

    def clear(self) -> None:
        """All is well from now on."""
        self.script.entries.clear()
        self.shortages.clear()
        self.boot_troubles.clear()
        self.action_troubles.clear()
        self.lag_s = 0.0
        self.server_limit_override = None

    # ----------------------------------------------------------------------------------------- what the emulator asks

    def take(self, method: str, path: str) -> Scripted | None:
        """What is to happen to this request; counted."""
        return self.script.take(method, path, self.now)

    def take_boot_trouble(self) -> BootTrouble | None:
        return self.boot_troubles.pop(0) if self.boot_troubles else None

    def take_action_trouble(self, command: str) -> str | None:
        """With which code an action that begins now will fail; counted."""
        trouble = next((each for each in self.action_troubles if each.command == command), None)
        if trouble is None:
            return None
        trouble.times -= 1
        if trouble.times <= 0:
            self.action_troubles.remove(trouble)
        return trouble.code

    def shortage(self, server_type: str, location: str) -> HetznerShortage | None:
        places = ((server_type, location), (server_type, "*"), ("*", location), ("*", "*"))
        found = [self.shortages[place] for place in places if place in self.shortages]
        return next((each for each in found if each.until is None or each.until > self.now), None)

    def to_json(self) -> Json:
        return {
            "scripted": self.script.to_json(),
            "no_capacity": [
                {"server_type": kind, "location": place, "code": each.code}
                for (kind, place), each in self.shortages.items()
            ],
            "list_lags_by_s": self.lag_s,
            "server_limit": self.server_limit_override,
            "next_boots": [{"extra_s": each.extra_s, "is_dead": each.is_dead} for each in self.boot_troubles],
            "next_actions": [
                {"command": each.command, "code": each.code, "times": each.times} for each in self.action_troubles
            ],
        }


# What can be called over HTTP.
METHODS = (
    "next", "next_create", "next_delete", "next_list", "burst", "drain_rate_limit", "no_capacity", "capacity",
    "list_lags", "server_limit", "next_boot", "next_action", "clear",
)  # fmt: skip
