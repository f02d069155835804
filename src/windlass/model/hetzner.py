"""Settings of Hetzner fleets: server types and locations, image, networks, addresses, billing."""

import re
from typing import Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from windlass.model.comma_separated import NumberList, TextList

HOUR_S = 3600
# Addresses of the private network that is created by default.
PRIVATE_RANGE = "10.0.0.0/16"
HETZNER_ENDPOINT = "https://api.hetzner.cloud/v1"
_CHOICE = re.compile(r"([a-z0-9-]+)@([a-z0-9-]+)")
_LABEL_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_LABEL_PREFIX = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


class Choice(NamedTuple):
    server_type: str
    location: str

    def __str__(self) -> str:
        return f"{self.server_type} in {self.location}"


class HetznerSettings(BaseModel):
    """Servers of Hetzner Cloud, for fleets with `provider = "hetzner"`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    choices: TextList = Field(
        default=("cx23@nbg1", "cx23@fsn1", "cx23@hel1"),
        min_length=1,
        description="Server type and location, in order of preference. The next is used if one has no capacity.",
    )
    image: str = Field(
        default="ubuntu-24.04",
        min_length=1,
        description="Name or id of the image. Needs Python 3.11 or newer, which ubuntu-22.04 does not have.",
    )
    network_id: int | None = Field(
        default=None,
        gt=0,
        description="Private network. Default: `hetzner_network_id`, or else the network windlass-ZONE (10.0.0.0/16), "
        "which is created if it does not exist.",
    )
    is_network_on: bool = Field(default=True, description="Attach servers to a private network.")
    is_ipv4_on: bool = Field(default=False, description="Assign a public IPv4 address, which costs extra.")
    is_ipv6_on: bool = Field(
        default=True, description="Assign a public IPv6 address, which is free. Packages are installed over it."
    )
    ssh_keys: TextList = Field(
        default=(),
        description="Names or ids of SSH keys for root. Default: none, and no log-in; the root password that Hetzner "
        "then creates is locked at first boot.",
    )
    firewall_ids: NumberList = Field(
        default=(),
        description="Firewalls for the public addresses. Default: the firewall windlass, which admits nothing and is "
        "created if it does not exist.",
    )
    is_firewall_on: bool = Field(default=True, description="Protect public addresses with a firewall.")
    labels: dict[str, str] = Field(default={}, description="Additional labels for servers.")
    prices: Literal["net", "gross"] = Field(
        default="net", description="Use prices without VAT (net) or with VAT (gross)."
    )
    capacity_memory_s: float = Field(
        default=300.0, ge=0, description="A choice without capacity is not used again for this long."
    )
    call_timeout_s: float = Field(default=20.0, gt=0, le=40, description="Timeout of an API call.")
    billing_hour_s: int = Field(
        default=HOUR_S,
        gt=0,
        le=HOUR_S,
        description="Length of a billed hour. Only for an emulator, whose hours may be shorter.",
    )

    @property
    def has_public_address(self) -> bool:
        return self.is_ipv4_on or self.is_ipv6_on

    @property
    def ordered(self) -> tuple[Choice, ...]:
        return tuple(Choice(*choice.split("@")) for choice in self.choices)

    @field_validator("choices")
    @classmethod
    def _check_choices(cls, choices: tuple[str, ...]) -> tuple[str, ...]:
        for choice in choices:
            if _CHOICE.fullmatch(choice) is None:
                raise ValueError(f"{choice!r} is not a server type and location: write cx23@nbg1")
        return tuple(dict.fromkeys(choices))

    @field_validator("billing_hour_s")
    @classmethod
    def _check_billing_hour(cls, seconds: int) -> int:
        # Otherwise the price per real hour, which costs are computed with, would not be an integer.
        if HOUR_S % seconds:
            raise ValueError(f"it must divide {HOUR_S}: use 60, 300 or 600")
        return seconds

    @field_validator("labels")
    @classmethod
    def _check_labels(cls, labels: dict[str, str]) -> dict[str, str]:
        for key, value in labels.items():
            problem = problem_of_label(key, value)
            if problem is not None:
                raise ValueError(problem)
            if key == "managed-by" or key.startswith("windlass-"):
                raise ValueError(f"the label {key} is reserved for windlass: choose another name")
        return labels

    @model_validator(mode="after")
    def _check_networks(self) -> Self:
        if not (self.has_public_address or self.is_network_on):
            raise ValueError(
                "is_network_on, is_ipv4_on and is_ipv6_on are all false: servers would have no network, so set one"
            )
        if self.network_id is not None and not self.is_network_on:
            raise ValueError("network_id is set and is_network_on is false: remove one of them")
        if self.firewall_ids and not self.is_firewall_on:
            raise ValueError("firewall_ids are set and is_firewall_on is false: remove one of them")
        if self.firewall_ids and not self.has_public_address:
            raise ValueError(
                "firewall_ids are set, but is_ipv4_on and is_ipv6_on are false: firewalls apply to public addresses "
                "only, so remove them"
            )
        return self


def problem_of_label(key: str, value: str) -> str | None:
    """Why Hetzner would reject a label; None if it is valid."""
    prefix, slash, name = key.rpartition("/")
    if _LABEL_NAME.fullmatch(name) is None or (slash and _LABEL_PREFIX.fullmatch(prefix) is None):
        return f"{key!r} is not a valid label: use at most 63 letters, digits, and _ . - between them"
    if prefix == "hetzner.cloud":
        return f"{key!r} is not a valid label: hetzner.cloud/ is reserved"
    if value and _LABEL_NAME.fullmatch(value) is None:
        return f"{value!r} is not a valid value of label {key}: use at most 63 letters, digits, and _ . - between them"
    return None
