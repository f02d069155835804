"""What is counted of a cycle: every outcome there is has a name."""

from typing import get_args

from windlass.control.summary import call_of, count_calls
from windlass.ports.control import Outcome, VolumeGrown, VolumeNotGrown


def test_every_outcome_is_counted_as_a_call_that_went_some_way() -> None:
    for kind in get_args(Outcome):
        call, how = call_of(object.__new__(kind))
        assert call in ("create", "delete", "prepare", "grow"), kind
        assert how in ("ok", "refused", "error"), kind


def test_storage_that_grows_is_counted_and_so_is_storage_that_does_not() -> None:
    outcomes = [VolumeGrown("v", 150, "full"), VolumeNotGrown("v", 150, "no answer"), VolumeGrown("u", 20, "full")]
    assert count_calls(True, [*outcomes]) == (("grow", "error", 1), ("grow", "ok", 2), ("list", "ok", 1))
