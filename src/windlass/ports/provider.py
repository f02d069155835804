"""Providers of machines.

The contract:
- `create` is called once per name. It returns the machine, or raises: Refused, NoCapacity and Throttled mean that no
  machine was made; Ambiguous means that one may have been made, or may still be. After any other failure of the call
  itself the adapter raises Ambiguous: only a provider's clear refusal is a refusal.
- `list_machines` returns every machine that carries this fleet's tags, or raises Unavailable. Never a part.
- `delete` returns when the provider says that the machine does not exist (any more). Deleting one that is gone is no
  error. Denied is not gone: it raises. It returns since when it is not paid for any more, where the provider says so;
  None is taken for now.
- `prepare` is asked for machines that run, where `traits.has_prepare_step`. It returns when the worker's program has
  been started on the machine, by this call or another: it is started once, however often and by however many it is
  asked for. It raises NotPrepared if that cannot be; after anything else it is asked for again. It alone may take
  minutes.
- No call takes longer than the adapter's own time limit. A machine without our tags is never touched. One that is
  there and paid for, and has lost them, is not gone: deleting it raises Refused. So does one whose id no machine of
  this provider can have: it may be another's.
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
        """`host_key`: whom an earlier call met there. `on_host_key` is told whom this one met first, before anything is
        done there; if that fails, so does the call."""

    async def close(self) -> None: ...


@runtime_checkable
class SharesVolume(Protocol):
    """A provider whose machines may share storage that can grow, and only grow."""

    async def volume(self) -> Volume | None:
        """As it is now. None: this fleet has none. Raises ProviderError if that cannot be known."""

    async def grow_volume(self, volume_id: str, size_gb: int) -> Volume:
        """At least so large from now on; one that is so already stays as it is. Raises ProviderError."""
