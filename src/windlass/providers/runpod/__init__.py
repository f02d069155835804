"""Workers on pods of Runpod.

`provider.py` implements the provider contract for one fleet; `pod_list.py` lists its pods. `account.py` is shared by
all fleets with one key: REST v2 over httpx, rate limited (`limiter.py`). `errors.py` classifies failed requests,
`naming.py` tags pods and builds requests, `catalog.py` reads prices and stock. `provisioning.py` checks a pod and starts
its worker over `ssh.py`; `doctor_checks.py` serves `windlass doctor`.
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
