"""What a Runpod fleet hires: GPU types, clouds and data centers in the order they are tried, the image, its storage;
and how the worker's program is started on a pod that does not start it by itself.

Everything here stands in the pod's own description, which whoever has the account's key may read: no secrets.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

RUNPOD_ENDPOINT = "https://api.runpod.io/v2"
# On every pod that is started over SSH, and where an image's start script should put what it finds in WINDLASS_JOIN.
JOIN_FILE = "/etc/windlass/join.json"
DEFAULT_START = f"windlass worker --join {JOIN_FILE}"
CLOUDS = ("SECURE", "COMMUNITY")
_CHOICE = re.compile(r"([^@/,]*[^@/,\s])(?:@([A-Za-z]+)((?:/[A-Za-z0-9-]+)*))?")
_PORT = re.compile(r"([0-9]{1,5})/(tcp|http)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A path without anything that a shell, or somebody who reads it, could take for something else.
_FOLDER = r"^/[A-Za-z0-9._/-]*[A-Za-z0-9._-]$"
_SSH_PORT = "22/tcp"
# How the vendor's GPU types of the one maker are called whose GPUs a worker can read.
_NVIDIA = ("NVIDIA ", "Tesla ")
# What has an id at Runpod: it becomes part of an address.
_ID = re.compile(r"[A-Za-z0-9_-]+")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
# Larger than any machine there is: the catalog says for each type what it has, this finds slips of the keyboard.
MAX_GPUS = 32
MAX_DISK_GB = 16_384


class GpuChoice(NamedTuple):
    """A GPU type, and where. No data centers: anywhere."""

    gpu: str
    cloud: str
    data_centers: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.gpu} in {self.cloud}{''.join(f'/{place}' for place in self.data_centers)}"


def _folder(path: str | None) -> str | None:
    if path is not None and {".", ".."} & set(path.split("/")):
        raise ValueError(f"{path!r} has a step that leads nowhere or back: write the folder itself")
    return path


class SshSettings(BaseModel):
    """How a pod is looked over and its worker started, with `auto_start_worker`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    user: str | None = Field(default=None, min_length=1, description="Who logs in. Without it: whom Runpod names.")
    private_key_file: Path | None = Field(
        default=None, description="The key that opens the pods. Without it: `runpod_ssh_key_file`."
    )
    start_command: str = Field(
        default=DEFAULT_START,
        min_length=1,
        description="Starts the worker, once: `bash /workspace/start.sh`. What it needs to join is in "
        + JOIN_FILE
        + ".",
    )
    start_watch_s: float = Field(
        default=3.0, ge=0, le=30, description="Ends it with an error within this time, the pod is given up."
    )
    storage_path: str | None = Field(
        default=None, pattern=_FOLDER, description="Must be mounted and writable. Without it: `volume_path`, if used."
    )
    min_free_disk_gb: float = Field(default=2.0, ge=0, description="Must be free on the container's disk.")
    checks: tuple[str, ...] = Field(
        default=(), description="Shell commands that must succeed, such as `python3 -c 'import torch'`."
    )
    command_timeout_s: float = Field(default=60.0, gt=0, le=300, description="Longest time for one of them.")
    timeout_s: float = Field(
        default=300.0, gt=0, le=1800, description="From the first look at a running pod to the start of its worker."
    )

    _whole_path = field_validator("storage_path")(_folder)

    @field_validator("start_command", "checks")
    @classmethod
    def _commands(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for command in (value,) if isinstance(value, str) else value:
            if not command.strip() or any(not (c.isprintable() or c in "\n\t") for c in command):
                raise ValueError("a command is text, and not empty")
        return value


class RunpodSettings(BaseModel):
    """Pods of Runpod, for fleets with `provider = "runpod"`. Nothing here may be secret."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    choices: tuple[str, ...] = Field(
        default=("NVIDIA GeForce RTX 4090@SECURE",),
        min_length=1,
        description="GPU type, cloud and data centers (any if none is named), as `NVIDIA L40S@SECURE/EU-RO-1/US-KS-2`, "
        "in the order in which they are tried; no capacity moves on to the next.",
    )
    gpu_count: int = Field(default=1, ge=1, le=MAX_GPUS, description="GPUs of a pod.")
    min_cuda_version: str | None = Field(
        default=None, pattern=r"^\d+\.\d+$", description="The oldest CUDA version a pod's machine may have: 12.4."
    )
    image: str | None = Field(default=None, min_length=1, description="The Docker image. Needed without a template.")
    template_id: str | None = Field(
        default=None, min_length=1, description="A template of Runpod's; what is set here is stronger."
    )
    registry_id: str | None = Field(
        default=None, min_length=1, description="The credential for a private image's registry."
    )
    args: str | None = Field(default=None, description="Arguments for the image's entrypoint.")
    env: dict[str, str] = Field(default={}, description="The container's environment. No secrets.")
    ports: tuple[str, ...] = Field(default=(), description="Ports to open, as 8888/http or 22/tcp.")
    disk_gb: int | None = Field(
        default=None,
        ge=1,
        le=MAX_DISK_GB,
        description="The container's disk. Without it: the template's, or Runpod's usual size.",
    )
    network_volume_id: str | None = Field(default=None, min_length=1, description="Storage that its pods share.")
    volume_path: str = Field(default="/workspace", pattern=_FOLDER, description="Where that is mounted.")
    capacity_memory_s: float = Field(
        default=300.0, ge=0, description="A choice without capacity is not tried again for this long."
    )
    call_timeout_s: float = Field(
        default=20.0,
        gt=0,
        le=40,
        description="Longest time for an answer of the API; of several fleets with one key, the longest.",
    )
    ssh: SshSettings = SshSettings()

    @property
    def ordered(self) -> tuple[GpuChoice, ...]:
        return tuple(_choice(choice) for choice in self.choices)

    @property
    def storage_path(self) -> str | None:
        """What must be mounted before a worker is started."""
        return self.ssh.storage_path or (self.volume_path if self.network_volume_id is not None else None)

    def opened_ports(self, *, has_ssh: bool) -> tuple[str, ...]:
        return (*self.ports, _SSH_PORT) if has_ssh and _SSH_PORT not in self.ports else self.ports

    @field_validator("choices", "ports", mode="before")
    @classmethod
    def _from_one_line(cls, value: Any) -> Any:
        """The environment has only text: items, separated by commas."""
        return [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value

    @field_validator("choices")
    @classmethod
    def _types_and_places(cls, choices: tuple[str, ...]) -> tuple[str, ...]:
        for choice in choices:
            found = _CHOICE.fullmatch(choice.strip())
            if found is None or (found[2] or CLOUDS[0]).upper() not in CLOUDS:
                raise ValueError(
                    f"{choice!r} is no GPU type and place: write NVIDIA L40S@SECURE, or NVIDIA L40S@SECURE/EU-RO-1, or "
                    "@COMMUNITY for the other cloud"
                )
            if not found[1].strip().startswith(_NVIDIA):
                raise ValueError(
                    f"{choice!r} is no GPU of NVIDIA's, and a worker can read no other: write its type as Runpod does, "
                    "NVIDIA L40S"
                )
        return tuple(dict.fromkeys(choices))

    _whole_path = field_validator("volume_path")(_folder)

    @field_validator("image")
    @classmethod
    def _reference(cls, image: str | None) -> str | None:
        if image is not None and _IMAGE.fullmatch(image) is None:
            raise ValueError(f"{image!r} is no image: write it as docker would pull it, ghcr.io/example/worker:1")
        return image

    @field_validator("network_volume_id", "template_id", "registry_id")
    @classmethod
    def _identifier(cls, value: str | None) -> str | None:
        if value is not None and _ID.fullmatch(value) is None:
            raise ValueError(f"{value!r} is no id of Runpod's: copy it from the console, as agv6w2qcg7")
        return value

    @field_validator("ports")
    @classmethod
    def _ports_and_protocols(cls, ports: tuple[str, ...]) -> tuple[str, ...]:
        for port in ports:
            found = _PORT.fullmatch(port)
            if found is None or not 0 < int(found[1]) < 65_536:
                raise ValueError(f"{port!r} is no port: write it as 22/tcp or 8888/http")
        return tuple(dict.fromkeys(ports))

    @field_validator("env")
    @classmethod
    def _variables(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if _VARIABLE.fullmatch(name) is None:
                raise ValueError(f"{name!r} cannot be the name of an environment variable")
            if name.startswith("WINDLASS_"):
                raise ValueError(f"{name} is windlass's own: choose another name")
        return env

    @model_validator(mode="after")
    def _can_be_placed(self) -> Self:
        community = [str(choice) for choice in self.ordered if choice.cloud == "COMMUNITY"]
        if self.network_volume_id is not None and community:
            raise ValueError(
                f"network_volume_id is set and {community[0]} is among the choices: network volumes are in the secure "
                "cloud only, so leave one of them out"
            )
        return self


def _choice(text: str) -> GpuChoice:
    found = _CHOICE.fullmatch(text.strip())
    if found is None:
        raise AssertionError("choices are validated")
    places = tuple(place for place in (found[3] or "").split("/") if place)
    return GpuChoice(found[1].strip(), (found[2] or CLOUDS[0]).upper(), places)
