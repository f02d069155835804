"""Settings of Runpod fleets: GPU types, clouds, data centers, image, storage, and how workers are started over SSH.

These settings must contain no secrets: everyone with the API key of the account can read them in a pod's description.
"""

import ipaddress
import re
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from windlass.model.comma_separated import TextList

RUNPOD_ENDPOINT = "https://api.runpod.io/v2"
# On every pod that is started over SSH. The start script of an image should write WINDLASS_JOIN to it.
JOIN_FILE = "/etc/windlass/join.json"
DEFAULT_START = f"windlass worker --join {JOIN_FILE}"
CLOUDS = ("SECURE", "COMMUNITY")
_CHOICE = re.compile(r"([^@/,]*[^@/,\s])(?:@([A-Za-z]+)((?:/[A-Za-z0-9-]+)*))?")
_PORT = re.compile(r"([0-9]{1,5})/(tcp|http)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A path without characters that a shell would interpret.
_FOLDER = r"^/[A-Za-z0-9._/-]*[A-Za-z0-9._-]$"
_SSH_PORT = "22/tcp"
# Prefixes of the names of NVIDIA GPUs. Workers cannot read other GPUs.
_NVIDIA = ("NVIDIA ", "Tesla ")
# An id at Runpod becomes a part of a URL.
_ID = re.compile(r"[A-Za-z0-9_-]+")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
_DOCKER_HUB = re.compile(r"^(?:(?:registry-1\.|index\.)?docker\.io/)?(?:library/)?")
# Public images without Windlass: a name, or with a slash at its end all images of an owner. They start no worker.
PUBLIC_IMAGES_WITH_SSH = ("runpod/",)
PUBLIC_IMAGES_WITHOUT_SSH = (
    *("python", "ubuntu", "debian", "alpine", "pytorch/pytorch", "tensorflow/tensorflow", "huggingface/"),
    *("nvidia/cuda", "nvcr.io/nvidia/", "vllm/vllm-openai", "jupyter/", "quay.io/jupyter/", "continuumio/"),
)
# Larger than any machine, to find typing errors. The limits of each type are in the catalog.
MAX_GPUS = 32
MAX_DISK_GB = 16_384


class GpuChoice(NamedTuple):
    """Without data centers: any of them."""

    gpu: str
    cloud: str
    data_centers: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.gpu} in {self.cloud}{''.join(f'/{place}' for place in self.data_centers)}"


def _folder(path: str | None) -> str | None:
    if path is not None and {".", ".."} & set(path.split("/")):
        raise ValueError(f"{path!r} must not contain . or ..")
    return path


class SshSettings(BaseModel):
    """How pods are checked and workers started over SSH, with `auto_start_worker`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    user: str | None = Field(
        default=None, min_length=1, description="User to log in as. Default: the user that Runpod reports."
    )
    private_key_file: Path | None = Field(default=None, description="Private key. Default: `runpod_ssh_key_file`.")
    start_command: str = Field(
        default=DEFAULT_START,
        min_length=1,
        description=f"Command that starts the worker, for example `bash /workspace/start.sh`. It can read {JOIN_FILE}.",
    )
    start_watch_s: float = Field(
        default=3.0, ge=0, le=30, description="The pod fails if the start command exits with an error within this time."
    )
    storage_path: str | None = Field(
        default=None,
        pattern=_FOLDER,
        description="Folder that must be mounted and writable. Default: `volume_path`, if a volume is used.",
    )
    min_free_disk_gb: float = Field(default=2.0, ge=0, description="Required free space on the container's disk.")
    checks: tuple[str, ...] = Field(
        default=(),
        description="Shell commands that must succeed before the worker is started, such as "
        "`python3 -c 'import torch'`.",
    )
    installs_windlass: bool = Field(
        default=True,
        description="Install Windlass and `bootstrap.requirements` in an environment of their own, unless the image "
        "brings the version of the control plane.",
    )
    has_image_packages: bool = Field(
        default=True, description="Whether that environment sees the Python packages of the image, such as torch."
    )
    install_timeout_s: float = Field(
        default=600.0, ge=30, le=1800, description="Timeout of the installation, in addition to `timeout_s`."
    )
    command_timeout_s: float = Field(default=60.0, gt=0, le=300, description="Timeout of one command.")
    timeout_s: float = Field(
        default=300.0,
        gt=0,
        le=1800,
        description="Timeout from the first check of a running pod to the start of its worker, without the "
        "installation.",
    )

    _whole_path = field_validator("storage_path")(_folder)

    @field_validator("start_command", "checks")
    @classmethod
    def _check_commands(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for command in (value,) if isinstance(value, str) else value:
            if not command.strip() or any(not (c.isprintable() or c in "\n\t") for c in command):
                raise ValueError("a command must be printable text, and not empty")
        return value


class RunpodSettings(BaseModel):
    """Pods of Runpod, for fleets with `provider = "runpod"`. These settings must contain no secrets."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    choices: TextList = Field(
        default=("NVIDIA GeForce RTX 4090@SECURE",),
        min_length=1,
        description="GPU type, cloud and data centers (default: any), as `NVIDIA L40S@SECURE/EU-RO-1/US-KS-2`, in "
        "order of preference. The next is used if one has no capacity.",
    )
    excluded_data_centers: TextList = Field(
        default=(), description="Data centers that are not used. A pod that Runpod places there is deleted."
    )
    excluded_hosts: TextList = Field(
        default=(),
        description="Public IP addresses of hosts that are not used, as `windlass workers hosts` lists them. A pod on "
        "one of them is deleted.",
    )
    gpu_count: int = Field(default=1, ge=1, le=MAX_GPUS, description="GPUs per pod.")
    min_cuda_version: str | None = Field(
        default=None, pattern=r"^\d+\.\d+$", description="Minimum CUDA version of the machine, for example 12.4."
    )
    image: str | None = Field(default=None, min_length=1, description="Docker image. Required without a template.")
    template_id: str | None = Field(
        default=None, min_length=1, description="Runpod template. These settings override it."
    )
    registry_id: str | None = Field(default=None, min_length=1, description="Registry credential for a private image.")
    args: str | None = Field(default=None, description="Arguments of the entrypoint.")
    env: dict[str, str] = Field(default={}, description="Environment variables of the container. No secrets.")
    ports: TextList = Field(default=(), description="Ports to open, for example 8888/http or 22/tcp.")
    disk_gb: int | None = Field(
        default=None,
        ge=1,
        le=MAX_DISK_GB,
        description="Disk of the container. Default: of the template, or of Runpod.",
    )
    network_volume_id: str | None = Field(default=None, min_length=1, description="Network volume that the pods share.")
    volume_path: str = Field(default="/workspace", pattern=_FOLDER, description="Mount point of the network volume.")
    capacity_memory_s: float = Field(
        default=300.0, ge=0, description="A choice without capacity is not used again for this long."
    )
    call_timeout_s: float = Field(
        default=20.0,
        gt=0,
        le=40,
        description="Timeout of an API call. Fleets with the same key use the longest of their timeouts.",
    )
    ssh: SshSettings = SshSettings()

    @property
    def ordered(self) -> tuple[GpuChoice, ...]:
        return tuple(_choice(choice) for choice in self.choices)

    @property
    def storage_path(self) -> str | None:
        """The folder that must be mounted before a worker is started."""
        return self.ssh.storage_path or (self.volume_path if self.network_volume_id is not None else None)

    def placement_problem(
        self, gpu: str, cloud: str, data_center: str | None, host: str | None, *, is_running: bool
    ) -> str | None:
        """Why a pod must not run there, as a sentence; None if it may.

        An empty `gpu` or `cloud` is unknown, and no problem. Without a data center, a pod is misplaced once it runs, if
        data centers were requested.
        """
        if host is not None and host in self.excluded_hosts:
            return f"Its host {host} is excluded by runpod.excluded_hosts"
        if data_center in self.excluded_data_centers:
            return f"Its data center {data_center} is excluded by runpod.excluded_data_centers"
        wanted = [choice for choice in self.ordered if gpu in ("", choice.gpu) and cloud in ("", choice.cloud)]
        if not wanted:
            return f"It is {gpu or 'a GPU'} in {cloud or 'an unknown cloud'}, which runpod.choices does not name"
        if any(not choice.data_centers or data_center in choice.data_centers for choice in wanted):
            return None
        named = ", ".join(dict.fromkeys(place for choice in wanted for place in choice.data_centers))
        if data_center is None:
            return (
                f"Runpod does not say in which data center it runs, and {named} was requested" if is_running else None
            )
        return f"Runpod placed it in {data_center}, but {named} was requested"

    def start_problem(self, *, has_ssh: bool) -> str | None:
        """Why no pod could ever run a worker, as the end of a sentence; None if one may.

        Only public images are judged. `args` and templates may start anything. `has_ssh`: with `auto_start_worker`.
        """
        if self.image is None or self.args or self.template_id is not None:
            return None
        is_bare = _is_one_of(self.image, PUBLIC_IMAGES_WITHOUT_SSH)
        if has_ssh and is_bare:
            return (
                f"has no SSH server, so auto_start_worker cannot start a worker. Use an image with one, such as "
                f"{PUBLIC_IMAGES_WITH_SSH[0]}pytorch, or start one with runpod.args"
            )
        if not has_ssh and (is_bare or _is_one_of(self.image, PUBLIC_IMAGES_WITH_SSH)):
            return (
                "starts no worker. Set auto_start_worker = true, which starts it over SSH, or use an image that does, "
                "see deploy/images"
            )
        return None

    def opened_ports(self, *, has_ssh: bool) -> tuple[str, ...]:
        return (*self.ports, _SSH_PORT) if has_ssh and _SSH_PORT not in self.ports else self.ports

    @field_validator("choices")
    @classmethod
    def _check_choices(cls, choices: tuple[str, ...]) -> tuple[str, ...]:
        for choice in choices:
            found = _CHOICE.fullmatch(choice.strip())
            if found is None or (found[2] or CLOUDS[0]).upper() not in CLOUDS:
                raise ValueError(
                    f"{choice!r} is not a GPU type and cloud: write NVIDIA L40S@SECURE, NVIDIA L40S@SECURE/EU-RO-1, or "
                    "@COMMUNITY for the other cloud"
                )
            if not found[1].strip().startswith(_NVIDIA):
                raise ValueError(
                    f"{choice!r} is not an NVIDIA GPU, and workers support no others: write the type as Runpod does, "
                    "for example NVIDIA L40S"
                )
        return tuple(dict.fromkeys(choices))

    _whole_path = field_validator("volume_path")(_folder)

    @field_validator("excluded_hosts")
    @classmethod
    def _check_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            try:
                ipaddress.ip_address(host)
            except ValueError:
                raise ValueError(f"{host!r} is not an IP address: copy it from `windlass workers hosts`") from None
        return tuple(dict.fromkeys(hosts))

    @field_validator("image")
    @classmethod
    def _check_image(cls, image: str | None) -> str | None:
        if image is not None and _IMAGE.fullmatch(image) is None:
            raise ValueError(f"{image!r} is not an image: write it as for docker pull, ghcr.io/example/worker:1")
        return image

    @field_validator("network_volume_id", "template_id", "registry_id")
    @classmethod
    def _check_id(cls, value: str | None) -> str | None:
        if value is not None and _ID.fullmatch(value) is None:
            raise ValueError(f"{value!r} is not an id of Runpod: copy it from the console, for example agv6w2qcg7")
        return value

    @field_validator("ports")
    @classmethod
    def _check_ports(cls, ports: tuple[str, ...]) -> tuple[str, ...]:
        for port in ports:
            found = _PORT.fullmatch(port)
            if found is None or not 0 < int(found[1]) < 65_536:
                raise ValueError(f"{port!r} is not a port: write 22/tcp or 8888/http")
        return tuple(dict.fromkeys(ports))

    @field_validator("env")
    @classmethod
    def _check_env(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if _VARIABLE.fullmatch(name) is None:
                raise ValueError(f"{name!r} is not a valid name of an environment variable")
            if name.startswith("WINDLASS_"):
                raise ValueError(f"{name} is reserved for windlass: choose another name")
        return env

    @model_validator(mode="after")
    def _check_excluded(self) -> Self:
        for choice in self.ordered:
            if choice.data_centers and set(choice.data_centers) <= set(self.excluded_data_centers):
                raise ValueError(
                    f"excluded_data_centers leaves no data center of {choice}: remove the choice or the exclusion"
                )
        return self

    @model_validator(mode="after")
    def _check_volume_cloud(self) -> Self:
        community = [str(choice) for choice in self.ordered if choice.cloud == "COMMUNITY"]
        if self.network_volume_id is not None and community:
            raise ValueError(
                f"network_volume_id is set and {community[0]} is one of the choices: network volumes exist only in the "
                "secure cloud, so remove one of them"
            )
        return self


def _is_one_of(image: str, names: tuple[str, ...]) -> bool:
    name = _DOCKER_HUB.sub("", image.partition("@")[0])
    folder, slash, last = name.rpartition("/")
    name = f"{folder}{slash}{last.partition(':')[0]}"
    return any(name.startswith(each) if each.endswith("/") else name == each for each in names)


def _choice(text: str) -> GpuChoice:
    found = _CHOICE.fullmatch(text.strip())
    if found is None:
        raise AssertionError("choices are validated")
    places = tuple(place for place in (found[3] or "").split("/") if place)
    return GpuChoice(found[1].strip(), (found[2] or CLOUDS[0]).upper(), places)
