"""Workers on pods of Runpod.

`provider.py` keeps the provider's contract for one fleet. `account.py` is what all fleets with one key share: REST v2
over httpx, within its limits (`limiter.py`), one list of pods, what is known of prices and stock (`catalog.py`).
`problems.py` says what each of the vendor's answers means, `naming.py` how our pods are told from all others and what
they are asked for. `preparing.py` leads from a pod that runs to a worker: what is looked at and started, over a shell
that `ssh.py` opens.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.providers.runpod.account import RunpodAccount
    from windlass.providers.runpod.provider import RunpodProvider

__all__ = ["RunpodAccount", "RunpodProvider"]


def __getattr__(name: str) -> Any:
    if name == "RunpodAccount":
        from windlass.providers.runpod.account import RunpodAccount  # noqa: PLC0415

        return RunpodAccount
    if name == "RunpodProvider":
        from windlass.providers.runpod.provider import RunpodProvider  # noqa: PLC0415

        return RunpodProvider
    raise AttributeError(f"module 'windlass.providers.runpod' has no attribute {name!r}")
