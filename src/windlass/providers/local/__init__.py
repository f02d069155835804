"""Workers as processes of this host.

`provider.py` keeps the provider's contract, `processes.py` reads the process table, `logs.py` keeps what workers print
within bounds, and `launch.py` is what a worker's process runs first. That one must not wait for the others to load.
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
