"""Workers on servers of Hetzner Cloud.

`provider.py` keeps the provider's contract for one fleet. `account.py` is what all fleets with one token share: the
vendor's SDK, asked in threads, within its limits (`limiter.py`). `problems.py` says what each of the vendor's answers
means, `naming.py` how our machines are told from all others, `catalog.py` what they cost and where there are any.
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
