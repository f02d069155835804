"""Checks that Ray and Python have the same versions in the whole cluster. Reads metadata, imports no Ray."""

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from windlass.model.errors import ConfigError

# Environment of nodes and drivers. By default Ray rejects a node with another Python patch version (3.11.4, 3.11.7):
# a machine whose image is one patch ahead of the head would be spawned, billed, and never admitted.
MATCH_MINOR_ENV = {"RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor"}


@dataclass(frozen=True, slots=True)
class Versions:
    ray: str
    python: str

    @property
    def python_minor(self) -> str:
        """3.11 of 3.11.7: the part that must match under MATCH_MINOR_ENV."""
        return ".".join(self.python.split(".")[:2])


def our_versions() -> Versions:
    """Raises ConfigError if ray is not installed."""
    try:
        return Versions(version("ray"), platform.python_version())
    except PackageNotFoundError:
        raise ConfigError('ray is not installed. Run `pip install "ray>=2.55"` in this environment.') from None


def check_versions(here: Versions, there: Versions, where: str) -> None:
    """Raise ConfigError unless the versions match. `where` names the owner of the versions `there`."""
    if here.ray != there.ray:
        raise ConfigError(
            f"Ray versions differ: {where} has {there.ray}, this host has {here.ray}. "
            f"Run `pip install ray=={there.ray}` here, or install {here.ray} there."
        )
    if here.python_minor != there.python_minor:
        raise ConfigError(
            f"Python versions differ: {where} has {there.python}, this host has {here.python}. "
            f"Run windlass with Python {there.python_minor}, or Ray there with {here.python_minor}."
        )


# The system Python of cloud images, from which a node makes its environment.
PYTHON_OF_IMAGE = {
    "ubuntu-22.04": "3.10",
    "ubuntu-24.04": "3.12",
    "ubuntu-26.04": "3.14",
    "debian-11": "3.9",
    "debian-12": "3.11",
    "debian-13": "3.13",
}
# Too old for windlass itself.
_UNSUPPORTED_PYTHONS = ("3.9", "3.10")


def check_node_image(here: Versions, image: str, fleet: str) -> None:
    """Raise ConfigError if nodes from this image are known to have another Python. Unknown images pass."""
    there = PYTHON_OF_IMAGE.get(image)
    if there is None or there == here.python_minor:
        return
    matching = [name for name, python in PYTHON_OF_IMAGE.items() if python == here.python_minor]
    fixes = [f"set fleets.{fleet}.hetzner.image to {matching[0]}"] if matching else []
    if there not in _UNSUPPORTED_PYTHONS:
        fixes.append(f"run windlass with Python {there}")
    fix = ", or ".join(fixes) or f"choose an image with Python {here.python_minor}"
    raise ConfigError(
        f"Python versions differ: nodes of fleet {fleet} from image {image} have {there}, this host has "
        f"{here.python}. To fix it, {fix}."
    )
