"""What a Hetzner fleet hires: server types and places in the order they are tried, the image, networks, addresses."""

import re
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

HOUR_S = 3600
HETZNER_ENDPOINT = "https://api.hetzner.cloud/v1"
_CHOICE = re.compile(r"([a-z0-9-]+)@([a-z0-9-]+)")
_LABEL_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_LABEL_PREFIX = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


class Choice(NamedTuple):
    """A server type and where."""

    server_type: str
    location: str

    def __str__(self) -> str:
        return f"{self.server_type} in {self.location}"


class HetznerSettings(BaseModel):
    """Servers of Hetzner Cloud, for fleets with `provider = "hetzner"`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    choices: tuple[str, ...] = Field(
        default=("cx23@nbg1", "cx23@fsn1", "cx23@hel1"),
        min_length=1,
        description="Server type and location, in the order in which they are tried; no capacity moves on to the next.",
    )
    image: str = Field(
        default="ubuntu-24.04",
        min_length=1,
        description="Name or id of the image. Its Python must be 3.11 or newer, which that of ubuntu-22.04 is not.",
    )
    network_id: int | None = Field(
        default=None, gt=0, description="The private network. Without it: `hetzner_network_id`, if that is set."
    )
    is_ipv4_on: bool = Field(default=True, description="A public IPv4 address. It costs extra.")
    is_ipv6_on: bool = Field(default=False, description="A public IPv6 address.")
    ssh_keys: tuple[str, ...] = Field(
        default=(),
        description="Names or ids of SSH keys that may log in. None: nobody can; the password that Hetzner then makes "
        "for root is locked at first boot.",
    )
    firewall_ids: tuple[int, ...] = Field(default=(), description="Firewalls before the public addresses.")
    labels: dict[str, str] = Field(default={}, description="More labels for its servers, beside those windlass needs.")
    prices: Literal["net", "gross"] = Field(default="net", description="Prices without VAT, or with it.")
    capacity_memory_s: float = Field(
        default=300.0, ge=0, description="A choice without capacity is not tried again for this long."
    )
    call_timeout_s: float = Field(default=20.0, gt=0, le=40, description="Longest time for an answer of the API.")
    billing_hour_s: int = Field(
        default=HOUR_S,
        gt=0,
        le=HOUR_S,
        description="How long an hour is that is paid at once. Only for rehearsals: an emulator's may be shorter.",
    )

    @property
    def ordered(self) -> tuple[Choice, ...]:
        return tuple(Choice(*choice.split("@")) for choice in self.choices)

    @field_validator("choices", "ssh_keys", "firewall_ids", mode="before")
    @classmethod
    def _from_one_line(cls, value: Any) -> Any:
        """The environment has only text: items, separated by commas."""
        return [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value

    @field_validator("choices")
    @classmethod
    def _types_and_places(cls, choices: tuple[str, ...]) -> tuple[str, ...]:
        for choice in choices:
            if _CHOICE.fullmatch(choice) is None:
                raise ValueError(f"{choice!r} is no server type and location: write them as cx23@nbg1")
        return tuple(dict.fromkeys(choices))

    @field_validator("billing_hour_s")
    @classmethod
    def _part_of_an_hour(cls, seconds: int) -> int:
        # Or a price per real hour, which is what we reckon with, would be no whole number.
        if HOUR_S % seconds:
            raise ValueError(f"{HOUR_S} s are no whole number of such hours: take 60, 300 or 600")
        return seconds

    @field_validator("labels")
    @classmethod
    def _vendors_labels(cls, labels: dict[str, str]) -> dict[str, str]:
        for key, value in labels.items():
            problem = problem_of_label(key, value)
            if problem is not None:
                raise ValueError(problem)
            if key == "managed-by" or key.startswith("windlass-"):
                raise ValueError(f"the label {key} is windlass's own: choose another name")
        return labels

    @model_validator(mode="after")
    def _can_be_reached(self) -> Self:
        if self.firewall_ids and not (self.is_ipv4_on or self.is_ipv6_on):
            raise ValueError(
                "firewall_ids are set and both is_ipv4_on and is_ipv6_on are false: firewalls stand before public "
                "addresses only, so leave them out"
            )
        return self


def problem_of_label(key: str, value: str) -> str | None:
    """What the vendor would not accept about a label, or None."""
    prefix, slash, name = key.rpartition("/")
    if _LABEL_NAME.fullmatch(name) is None or (slash and _LABEL_PREFIX.fullmatch(prefix) is None):
        return f"{key!r} cannot be a label: letters, digits and _ . - between, at most 63 of them"
    if prefix == "hetzner.cloud":
        return f"{key!r} cannot be a label: hetzner.cloud/ is the vendor's own"
    if value and _LABEL_NAME.fullmatch(value) is None:
        return f"{value!r} cannot be the value of label {key}: letters, digits and _ . - between, at most 63 of them"
    return None
