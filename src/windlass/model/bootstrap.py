"""How a rented machine becomes a worker: what is installed on it and run before it joins.

Everything here is written into the machine's user data, which whoever runs on that machine may read: no secrets belong
here. Names are checked so far that none is taken for an option or for two; setup commands run as they are, as root.
"""

import re
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

# What Hetzner takes as user data; others take at least half of it.
MAX_USER_DATA_BYTES = 32 * 1024
# None of these may begin with a dash: apt and docker would take it for an option.
_PACKAGE = re.compile(r"[a-z0-9][A-Za-z0-9+.:~=/_-]*")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]*")
# A colon before the port only, unless the host is in brackets: an IPv6 address.
_RAY_ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_RAY_REQUIREMENT = re.compile(r"ray\b(?!-)", re.IGNORECASE)


def _package(name: str) -> str:
    if not _PACKAGE.fullmatch(name):
        raise ValueError("this is no name of an Ubuntu package")
    return name


def _image(name: str) -> str:
    if not _IMAGE.fullmatch(name):
        raise ValueError("this is no name of a Docker image: write it as in `docker pull`, like python:3.11-slim")
    return name


def _line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError("a requirement is one line, as in pip's requirements files")
    return text


def _shell_command(text: str) -> str:
    if not text.strip():
        raise ValueError("an empty command does nothing: leave it out")
    if any(not (c.isprintable() or c in "\n\t") for c in text):
        raise ValueError("a command is text: it has no control characters but line ends and tabs")
    return text


class BootstrapSettings(BaseModel):
    """How a rented machine becomes a worker: see [Bootstrap](bootstrap.md). Nothing here may be secret."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    has_docker: bool = Field(default=False, description="Install Docker and let the worker use it.")
    images: tuple[Annotated[str, AfterValidator(_image)], ...] = Field(
        default=(), description="Docker images that are pulled before the worker starts. One that fails stops nothing."
    )
    packages: tuple[Annotated[str, AfterValidator(_package)], ...] = Field(
        default=(), description="Ubuntu packages, beside those that are needed anyway."
    )
    requirements: tuple[Annotated[str, AfterValidator(_line)], ...] = Field(
        default=(), description="Lines of a requirements file for pip: what the handler needs, or the handler itself."
    )
    setup: tuple[Annotated[str, AfterValidator(_shell_command)], ...] = Field(
        default=(),
        description="Shell commands, run as root after everything is installed. One that fails stops the boot.",
    )
    user: str = Field(
        default="windlass", pattern=f"^{_USER.pattern}$", description="Whom the worker runs as. It is made if missing."
    )
    ray_address: str | None = Field(
        default=None,
        pattern=f"^{_RAY_ADDRESS.pattern}$",
        description="Ray's head, as host:port. The machine becomes a node of it before its worker starts.",
    )
    ray_num_cpus: int | None = Field(
        default=None, ge=0, description="CPUs the machine offers to Ray. Without it: all it has."
    )
    ca_file: Path | None = Field(
        default=None,
        description="Certificate (PEM) of the authority that vouches for the control plane, if it is one of your own.",
    )
    template: Path | None = Field(
        default=None, description="A template of your own instead of ours; it may extend ours and change parts."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.images and not self.has_docker:
            raise ValueError("images are to be pulled but has_docker is false: set it, or leave the images out")
        if self.ray_num_cpus is not None and self.ray_address is None:
            raise ValueError("ray_num_cpus is set but ray_address is not: say which head the machines join")
        if self.ray_address is not None and not any(map(_RAY_REQUIREMENT.match, self.requirements)):
            raise ValueError(
                "ray_address is set but none of the requirements installs Ray: add ray[default]==<the head's version>"
            )
        return self
