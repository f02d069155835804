"""What a producer may hand in."""

import json
import math
from datetime import UTC, datetime
from typing import Any

import pytest

from windlass.model.errors import BadInput
from windlass.model.task import check_json_text, check_queue_name, new_task, parse_json, to_json


def test_a_task_keeps_what_it_was_given() -> None:
    due = datetime(2030, 1, 31, tzinfo=UTC)
    task = new_task("q", {"ü": [1, None]}, priority=-5, run_after=due, max_attempts=1, timeout_s=0.5, unique_key="k")
    assert task.payload == '{"ü":[1,null]}'
    assert (task.priority, task.run_after, task.max_attempts, task.timeout_s, task.unique_key) == (-5, due, 1, 0.5, "k")


@pytest.mark.parametrize("name", ["q", "Renders", "a.b:c_d-e", "0", "x" * 63])
def test_a_queue_may_be_called(name: str) -> None:
    assert check_queue_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("", id="nothing"),
        pytest.param("a b", id="two words"),
        pytest.param("-a", id="a dash first"),
        pytest.param("ü", id="another alphabet"),
        pytest.param("a\n", id="a line's end"),
        pytest.param("x" * 64, id="64 characters"),
    ],
)
def test_a_queue_cannot_be_called(name: str) -> None:
    with pytest.raises(BadInput, match="cannot be a queue's name"):
        new_task(name)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        pytest.param({"max_attempts": 0}, "needs from 1", id="no attempt"),
        pytest.param({"max_attempts": 2**31}, "needs from 1", id="more attempts than the database counts"),
        pytest.param({"priority": 2**31}, "32 bits", id="a priority too high"),
        pytest.param({"priority": -(2**31) - 1}, "32 bits", id="a priority too low"),
        pytest.param({"priority": 0.5}, "whole number", id="half a priority"),
        pytest.param({"timeout_s": 0}, "must be above 0", id="no time"),
        pytest.param({"timeout_s": math.nan}, "must be above 0", id="a time that is no number"),
        pytest.param({"timeout_s": math.inf}, "must be above 0", id="all the time"),
        pytest.param({"unique_key": "k" * 201}, "201 characters", id="a key too long"),
        pytest.param({"unique_key": "a\0b"}, "NUL", id="a key with NUL"),
        pytest.param({"unique_key": "\ud800"}, "surrogate", id="a key with half a character"),
        pytest.param({"run_after": datetime(2030, 1, 1)}, "no time zone", id="a time without zone"),
        pytest.param(
            {"run_after": datetime.max.replace(tzinfo=UTC)}, "only the years 2 to 9998", id="a time beyond all"
        ),
        pytest.param({"payload": {1, 2}}, "cannot be written as JSON", id="a set"),
        pytest.param({"payload": math.nan}, "cannot be written as JSON", id="not a number"),
        pytest.param({"payload": "a\0b"}, "NUL character", id="NUL in the payload"),
        pytest.param({"payload": {"a\0": 1}}, "NUL character", id="NUL in a key of the payload"),
        pytest.param({"payload": "\udcff"}, "surrogate", id="half a character"),
        pytest.param({"payload": "x" * 1024 * 1024}, "1,048,578 bytes and at most 1,048,576", id="too much"),
    ],
)
def test_a_task_is_refused_with(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        new_task("q", **given)


def test_a_payload_nested_too_deeply_is_refused() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(BadInput, match="cannot be written as JSON"):
        new_task("q", nested)


def test_the_limit_counts_bytes_not_characters() -> None:
    assert to_json("ü" * 4, "it", 10) == '"üüüü"'
    with pytest.raises(BadInput, match="12 bytes"):
        to_json("ü" * 5, "it", 10)


@pytest.mark.parametrize("text", ["\\u0000", "\\\\u0000", 'say "\\u0000"'])
def test_text_that_only_looks_like_an_escaped_nul_is_accepted(text: str) -> None:
    assert json.loads(to_json(text, "it", 100)) == text


@pytest.mark.parametrize(
    "text",
    ["[" * 900 + "]" * 900, json.dumps(["[" * 5_000, '\\"[[[' * 500]), "[" + ",".join(["{}"] * 5_000) + "]"],
    ids=["900 levels", "brackets in strings", "many short lists"],
)
def test_json_up_to_900_levels_is_parsed(text: str) -> None:
    assert parse_json(text) == json.loads(text)


def test_json_of_901_levels_is_rejected_on_every_python() -> None:
    with pytest.raises(ValueError, match="nested more than 900 levels deep"):
        parse_json('{"a":' * 901 + "1" + "}" * 901)


def test_json_of_901_levels_is_refused_when_it_is_enqueued() -> None:
    def nested(levels: int) -> str:
        return '{"a":' * levels + "1" + "}" * levels

    assert check_json_text(nested(900).encode(), "it", 10_000) == nested(900)
    assert to_json(json.loads(nested(900)), "it", 10_000) == nested(900)
    for refuse in (
        lambda: check_json_text(nested(901).encode(), "it", 10_000),
        lambda: to_json(json.loads(nested(901)), "it", 10_000),
    ):
        with pytest.raises(BadInput, match="it is nested more than 900 levels deep"):
            refuse()
