"""Workers as processes of this host.

`provider.py` implements the provider contract, `worker_process.py` starts a process, `processes.py` reads the process
table, `logs.py` bounds log files, and `entry_point.py` is the entry point of a worker process. `entry_point.py` must
start fast, so nothing is imported here until it is used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.providers.local.provider import LocalProvider

__all__ = ["LocalProvider"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from windlass.providers.local import provider  # noqa: PLC0415

        return getattr(provider, name)
    raise AttributeError(f"module 'windlass.providers.local' has no attribute {name!r}")
