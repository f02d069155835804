"""Versions of Ray and Python that work together, and labels of nodes."""

import pytest

from windlass.model.errors import ConfigError
from windlass.ray.cluster import to_label_value
from windlass.ray.versions import Versions, check_node_image, check_versions

OURS = Versions("2.60.0", "3.11.7")


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (
            Versions("2.9.0", "3.11.4"),
            "Ray versions differ: the head has 2.9.0, this host has 2.60.0. Run `pip install ray==2.9.0` here",
        ),
        (
            Versions("2.60.0", "3.12.1"),
            "Python versions differ: the head has 3.12.1, this host has 3.11.7. Run windlass with Python 3.12, or",
        ),
    ],
    ids=["another Ray", "another Python"],
)
def test_version_mismatch_is_rejected_with_a_fix(there: Versions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_versions(OURS, there, "the head")


def test_python_patch_versions_may_differ() -> None:
    check_versions(OURS, Versions("2.60.0", "3.11.9"), "the head")


def test_image_with_another_python_is_rejected_before_a_machine_is_spawned() -> None:
    check_node_image(OURS, "debian-12", "many")
    check_node_image(OURS, "my-own-image", "many")
    with pytest.raises(
        ConfigError, match=r"image ubuntu-24.04 have 3.12, .*set fleets.many.hetzner.image to debian-12"
    ):
        check_node_image(OURS, "ubuntu-24.04", "many")
    # Windlass does not run with Python 3.10, so only another image helps.
    with pytest.raises(ConfigError, match=r"have 3.10, .* To fix it, set fleets.many.hetzner.image to debian-12\.$"):
        check_node_image(OURS, "ubuntu-22.04", "many")
    with pytest.raises(ConfigError, match=r"choose an image with Python 3.15\.$"):
        check_node_image(Versions("2.60.0", "3.15.0"), "ubuntu-22.04", "many")


def test_fleet_names_become_distinct_valid_labels() -> None:
    assert to_label_value("gpu-fleet.1") == "gpu-fleet.1"
    labels = {to_label_value("a:b"), to_label_value("a-b"), to_label_value("a:b:"), to_label_value("x" * 63)}
    assert len(labels) == 4
    assert all(":" not in label and len(label) <= 63 for label in labels)
