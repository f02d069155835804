"""Providers of machines.

The contract:
- `create` is called once per name. It returns the machine or raises. Refused, NoCapacity and Throttled: no machine was
  created. Ambiguous: a machine may exist, or may still appear. Every failure that is not a clear refusal of the
  provider is Ambiguous.
- `list_machines` returns every machine with this fleet's tags, or raises Unavailable. It never returns a part.
- `delete` returns when the provider confirms that the machine does not exist; deleting a missing machine is no error.
  Denied raises. The return value is the end of billing where the provider reports it; None means now.
- `prepare` is called for running machines if `traits.has_prepare_step`. It returns when the worker program has been
  started, by this call or an earlier one: the program is started once, however often `prepare` is called. NotPrepared
  is final; after any other error the call is repeated. Only this call may take minutes.
- Every call has the adapter's time limit. A machine without our tags is never changed. Deleting a machine that exists,
  is billed and has lost its tags raises Refused. So does an id that no machine of this provider can have: it may belong
  to another provider.
"""

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Protocol, runtime_checkable

from windlass.model.machine import Machine, MachineRequest, Preparation, ProviderTraits, Volume

# Receives the SSH host key that a machine presents first.
OnHostKey = Callable[[str], Awaitable[None]]


class Provider(Protocol):
    @property
    def traits(self) -> ProviderTraits: ...

    async def create(self, request: MachineRequest) -> Machine: ...

    async def list_machines(self) -> tuple[Machine, ...]: ...

    async def delete(self, machine: Machine) -> datetime | None: ...

    async def prepare(self, machine: Machine, host_key: str | None, on_host_key: OnHostKey) -> Preparation:
        """`host_key`: the SSH host key of an earlier call. Without one, `on_host_key` gets the key that the machine
        presents, before anything is changed there. If `on_host_key` fails, so does the call."""

    async def close(self) -> None: ...


@runtime_checkable
class KnowsPrices(Protocol):
    """A provider whose prices are published, so that a machine that is gone can still be priced."""

    async def price(self, machine: Machine) -> Machine:
        """The machine, of which at least the type is known, with its price if that is known now."""


@runtime_checkable
class KeepsBootLog(Protocol):
    """A provider that keeps what a machine printed, at least until the machine is deleted."""

    async def boot_log(self, machine: Machine) -> str:
        """The last lines, at most MAX_BOOT_LOG_CHARACTERS. Empty if there are none. Raises ProviderError."""


@runtime_checkable
class SharesVolume(Protocol):
    """A provider whose machines can share a volume. A volume never shrinks."""

    async def volume(self) -> Volume | None:
        """The volume now; None if this fleet has none. Raises ProviderError if it cannot be read."""

    async def grow_volume(self, volume_id: str, size_gb: int) -> Volume:
        """Grow the volume to at least this size. A larger volume is not changed. Raises ProviderError."""
