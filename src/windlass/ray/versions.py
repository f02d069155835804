"""Ray and Python of whoever works together must be the same. Reads what is installed; imports nothing of it."""

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from windlass.model.errors import ConfigError

# For whoever joins or drives. By itself Ray takes 3.11.4 and 3.11.7 for strangers: a node whose image is a patch ahead
# of the head would be hired, paid for, and never let in.
MATCH_MINOR = {"RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor"}


@dataclass(frozen=True, slots=True)
class Versions:
    ray: str
    python: str

    @property
    def python_minor(self) -> str:
        """3.11 of 3.11.7: what must be the same, since we tell Ray so (MATCH_MINOR)."""
        return ".".join(self.python.split(".")[:2])


def our_versions() -> Versions:
    """Raises ConfigError where ray is not installed."""
    try:
        return Versions(version("ray"), platform.python_version())
    except PackageNotFoundError:
        raise ConfigError('ray is not installed here: pip install "windlass[ray]".') from None


def check_versions(here: Versions, there: Versions, where: str) -> None:
    """Raise ConfigError unless the two can work together. `where`: of whom `there` are the versions."""
    if here.ray != there.ray:
        raise ConfigError(
            f"{where} runs Ray {there.ray} and here is Ray {here.ray}, which cannot work together: "
            f"pip install ray=={there.ray} here, or bring {where} to {here.ray}."
        )
    if here.python_minor != there.python_minor:
        raise ConfigError(
            f"{where} runs Python {there.python} and here is Python {here.python}, which cannot work together: "
            f"run windlass with Python {there.python_minor}, or {where} with {here.python_minor}."
        )


# The Python that comes with the images of clouds; a node makes its environment with it.
PYTHON_OF_IMAGE = {
    "ubuntu-22.04": "3.10",
    "ubuntu-24.04": "3.12",
    "ubuntu-26.04": "3.14",
    "debian-11": "3.9",
    "debian-12": "3.11",
    "debian-13": "3.13",
}
# Older than what windlass itself needs: nothing can be done with them.
_TOO_OLD = ("3.9", "3.10")


def check_node_image(here: Versions, image: str, fleet: str) -> None:
    """Raise ConfigError where it is known that nodes made from this image could not work with us."""
    there = PYTHON_OF_IMAGE.get(image)
    if there is not None and there != here.python_minor:
        fitting = [name for name, python in PYTHON_OF_IMAGE.items() if python == here.python_minor]
        ways = [f"set fleets.{fleet}.hetzner.image to {fitting[0]}"] if fitting else []
        if there not in _TOO_OLD:
            ways.append(f"run windlass with Python {there}")
        raise ConfigError(
            f"the nodes of fleet {fleet} are made from {image}, which has Python {there}, and here is Python "
            f"{here.python}, which cannot work together in Ray: "
            f"{', or '.join(ways) or f'choose an image that has Python {here.python_minor}'}."
        )
