"""Workers on servers of Hetzner Cloud.

`provider.py` implements the provider contract for one fleet; `server_list.py` lists its servers. `account.py` is shared
by all fleets with one token: the vendor's SDK in threads, rate limited (`limiter.py`). `errors.py` classifies failed
requests, `naming.py` names and labels servers, `catalog.py` reads prices, `primary_ips.py` deletes orphaned addresses,
`doctor_checks.py` serves `windlass doctor`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.providers.hetzner.account import HetznerAccount
    from windlass.providers.hetzner.provider import HetznerProvider

__all__ = ["HetznerAccount", "HetznerProvider"]


def __getattr__(name: str) -> Any:
    if name == "HetznerAccount":
        from windlass.providers.hetzner.account import HetznerAccount  # noqa: PLC0415

        return HetznerAccount
    if name == "HetznerProvider":
        from windlass.providers.hetzner.provider import HetznerProvider  # noqa: PLC0415

        return HetznerProvider
    raise AttributeError(f"module 'windlass.providers.hetzner' has no attribute {name!r}")
