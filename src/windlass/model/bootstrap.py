"""Bootstrap settings of a fleet: what is installed on a rented machine and run before it joins.

All of it is written into the machine's user data, which every process on the machine may read, so it must contain no
secrets. Names are validated so that none is taken for an option or for two names. Setup commands run unchanged, as
root.
"""

import re
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

# Hetzner's limit for user data; other vendors accept at least half of it.
MAX_USER_DATA_BYTES = 32 * 1024
# No name may begin with a dash, which apt and docker would take for an option.
_PACKAGE = re.compile(r"[a-z0-9][A-Za-z0-9+.:~=/_-]*")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]*")
# Only the port may follow a colon, unless the host is an IPv6 address in brackets.
_RAY_ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_RAY_REQUIREMENT = re.compile(r"ray\b(?!-)", re.IGNORECASE)


def _package(name: str) -> str:
    if not _PACKAGE.fullmatch(name):
        raise ValueError("not a valid Ubuntu package name")
    return name


def _image(name: str) -> str:
    if not _IMAGE.fullmatch(name):
        raise ValueError("not a valid Docker image name: write it as for `docker pull`, for example python:3.11-slim")
    return name


def _line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError("a requirement must be one line of a pip requirements file")
    return text


def _shell_command(text: str) -> str:
    if not text.strip():
        raise ValueError("the command is empty: remove it")
    if any(not (c.isprintable() or c in "\n\t") for c in text):
        raise ValueError("the command contains control characters other than line breaks and tabs")
    return text


class BootstrapSettings(BaseModel):
    """What is installed on a rented machine: see [Bootstrap](bootstrap.md). Must not contain secrets."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    has_docker: bool = Field(default=False, description="Install Docker and give the worker access to it.")
    images: tuple[Annotated[str, AfterValidator(_image)], ...] = Field(
        default=(), description="Docker images to pull before the worker starts. A failed pull does not stop the boot."
    )
    packages: tuple[Annotated[str, AfterValidator(_package)], ...] = Field(
        default=(), description="Ubuntu packages to install in addition to those that Windlass needs."
    )
    requirements: tuple[Annotated[str, AfterValidator(_line)], ...] = Field(
        default=(), description="Lines of a pip requirements file: dependencies of the handler, or the handler itself."
    )
    setup: tuple[Annotated[str, AfterValidator(_shell_command)], ...] = Field(
        default=(),
        description="Shell commands to run as root after the installation. A failed command stops the boot.",
    )
    user: str = Field(
        default="windlass", pattern=f"^{_USER.pattern}$", description="User that runs the worker. Created if missing."
    )
    ray_address: str | None = Field(
        default=None,
        pattern=f"^{_RAY_ADDRESS.pattern}$",
        description="Address of the Ray head, as host:port. The machine joins it as a node before its worker starts.",
    )
    ray_num_cpus: int | None = Field(
        default=None, ge=0, description="CPUs that the machine offers to Ray. Default: all."
    )
    ca_file: Path | None = Field(
        default=None,
        description="CA certificate (PEM) of the control plane, if it is not publicly trusted.",
    )
    template: Path | None = Field(
        default=None, description="Path of a custom cloud-init template, which may extend the default one."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.images and not self.has_docker:
            raise ValueError("images requires has_docker: set has_docker = true or remove the images")
        if self.ray_num_cpus is not None and self.ray_address is None:
            raise ValueError("ray_num_cpus requires ray_address: set the address of the Ray head")
        if self.ray_address is not None and not any(map(_RAY_REQUIREMENT.match, self.requirements)):
            raise ValueError("ray_address requires Ray: add ray[default]==<version of the head> to the requirements")
        return self
