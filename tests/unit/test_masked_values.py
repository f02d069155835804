"""Secrets in structured data: hidden in its text, and never in its keys, numbers and identifiers."""

import base64
import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Literal, get_args, get_origin
from urllib.parse import quote

import pytest
from markupsafe import Markup

from support.known_secrets import known_secrets
from windlass.dashboard.rendering import PageContext, asset, error_page
from windlass.model.event import Event
from windlass.model.fleet import FleetConfig
from windlass.model.machine import Machine, MachineState
from windlass.model.masked_values import masked_json, without_secrets_inside
from windlass.model.redaction import HIDDEN, without_known_secrets
from windlass.model.rollout import WorkingVersion, changed_settings
from windlass.model.snapshot import Hold, PlannerState, Snapshot, WorkerView
from windlass.model.worker import WorkerStatus
from windlass.server.json_api import json_response
from windlass.store.rows import snapshot_adapter

NOW = datetime(2026, 11, 19, 18, 0, 0, 100_000, tzinfo=UTC)
MACHINE = Machine("m-renders-0", "renders-0-a", MachineState.RUNNING, NOW, price_micros_per_hour=100_000)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        pytest.param({"price_micros": 100000}, {"price_micros": 100000}, id="number"),
        pytest.param({"limit": "100000 tokens"}, {"limit": f"{HIDDEN} tokens"}, id="number in a text"),
        pytest.param({"renders": "renders"}, {"renders": HIDDEN}, id="key"),
        pytest.param({"worker_id": "s3cr3t-0-a"}, {"worker_id": "s3cr3t-0-a"}, id="worker"),
        pytest.param({"queues": ["s3cr3t"]}, {"queues": ["s3cr3t"]}, id="queues"),
        pytest.param({"fleet": {"reason": "s3cr3t"}}, {"fleet": {"reason": HIDDEN}}, id="part of a fleet"),
        pytest.param({"at": "x", "reason": ("a", "s3cr3t")}, {"at": "x", "reason": ("a", HIDDEN)}, id="items"),
        pytest.param({"env": {"name": "s3cr3t"}}, {"env": {"name": HIDDEN}}, id="table of foreign names"),
        pytest.param(
            [MachineState.RUNNING, Markup("<i>s3cr3t</i>")], [MachineState.RUNNING, "<i>s3cr3t</i>"], id="ours"
        ),
    ],
)
def test_secret_is_hidden_in_text_and_nowhere_else(value: Any, shown: Any) -> None:
    with known_secrets("100000", "renders", "s3cr3t", "running"):
        assert without_secrets_inside(value) == shown


def test_value_without_a_secret_is_not_copied() -> None:
    snapshot = Snapshot(NOW, "renders", machines=(MACHINE,), settings=FleetConfig(handler="app:work"))
    with known_secrets("100000", "renders"):
        assert without_secrets_inside(snapshot) is snapshot
        hold = Hold("DENIED", "no renders", NOW)
        changed = without_secrets_inside(replace(snapshot, planner_state=PlannerState(hold=hold)))
        assert changed.machines is snapshot.machines
        assert changed.planner_state.hold == replace(hold, reason=f"no {HIDDEN}")


def test_lines_of_a_list_hide_a_secret_that_continues() -> None:
    key = "glpat-4fQ9zR7wYb2KxVn8LmTd"
    with known_secrets(key):
        assert without_secrets_inside(["begin", f"key {key[:9]}", f"{key[9:]} end", "a\nb"]) == [
            "begin", f"key {HIDDEN}", f"{HIDDEN} end", "a\nb",
        ]  # fmt: skip


OPTIONS = {
    "local": {"handler": "app:work", "run_as": "renders", "redact": ["$.prompt"], "policy": "adaptive"},
    "hetzner": {
        "handler": "app:work",
        "hetzner": {"choices": ["cx2345@nbg1"], "image": "ubuntu-24.04", "labels": {"team": "renders"}},
        "bootstrap": {"user": "windlass", "packages": ["ffmpeg"], "setup": ["login windlass"]},
    },
    "runpod": {
        "handler": "app:work",
        "runpod": {
            "choices": ["NVIDIA L4@SECURE"], "image": "example/renders:latest", "ports": ["8888/http"],
            "excluded_hosts": ["198.51.100.7"], "network_volume_id": "volume1234", "volume_path": "/renders",
            "ssh": {"user": "windlass", "storage_path": "/renders"},
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("provider", OPTIONS)
def test_snapshot_can_be_read_whatever_setting_is_a_secret(provider: str) -> None:
    options = {option for field in FleetConfig.model_fields.values() for option in _options(field.annotation)}
    assert {"adaptive", "runpod"} <= options
    settings = FleetConfig.model_validate({"provider": provider, **OPTIONS[provider]})
    options |= {*_texts(settings.model_dump(mode="json")), "active", "2026-11-19"}
    worker = WorkerView("w0", 0, WorkerStatus.ACTIVE, False, 1, NOW, reason="adaptive", provider=provider)
    snapshot = Snapshot(NOW, "adaptive", workers=(worker,), settings=settings)
    with known_secrets(*options):
        text = masked_json(lambda value: snapshot_adapter().dump_json(value).decode(), snapshot)
    shown = snapshot_adapter().validate_json(text)
    assert shown.workers == (replace(worker, reason=HIDDEN),)
    assert shown.settings is not None and shown.settings.provider == provider


def _texts(value: Any) -> set[str]:
    if isinstance(value, dict | list):
        return set().union(*map(_texts, value.values() if isinstance(value, dict) else value))
    return {value} if isinstance(value, str) else set()


def _options(kind: Any) -> set[str]:
    if get_origin(kind) is Literal:
        return {option for option in get_args(kind) if isinstance(option, str)}
    return set().union(*map(_options, get_args(kind)))


def test_settings_of_a_working_version_stay_json() -> None:
    settings = json.dumps({"handler": "app:work", "limit": 100000, "setup": ["token 100000"]})
    with known_secrets("100000", "handler"):
        shown = without_secrets_inside(WorkingVersion("f1", settings)).settings
    assert json.loads(shown) == {"handler": "app:work", "limit": 100000, "setup": [f"token {HIDDEN}"]}
    assert changed_settings(settings, shown) == ("setup",)


@pytest.mark.parametrize(
    "text",
    [
        "windlass", "password windlass.", "key='windlass'", "PGPASSWORD=windlass", "x\nwindlass\n", "a\\nwindlass\\nb",
        "postgresql://app:windlass@db/app", quote("postgresql://app:windlass@db/app", safe=""),
        quote(quote("://app:windlass@db", safe=""), safe=""), json.dumps('"windlass"'), "\\u0022windlass\\u0022",
        "&quot;windlass&quot;", json.dumps("é\twindlass"), "a.\n.windlass",
    ],
)  # fmt: skip
def test_ordinary_word_is_hidden_where_it_stands_alone(text: str) -> None:
    with known_secrets("windlass"):
        assert "windlass" not in without_known_secrets(text)
        assert HIDDEN in json.loads(masked_json(json.dumps, {"error": text}))["error"]


@pytest.mark.parametrize("encode", [lambda text: base64.b64encode(b"app:" + text).decode(), bytes.hex])
def test_ordinary_word_is_hidden_in_base64_and_hexadecimal_digits(encode: Any) -> None:
    with known_secrets("windlass", "100000"):
        for secret in (b"windlass", b"100000"):
            assert HIDDEN in without_known_secrets(f"x {encode(secret)} y")


@pytest.mark.parametrize(
    "text",
    [
        "windlass.toml", "/static/windlass.css?v=1", "windlass-0-a", "gpu-windlass", "windlass_internal", "windlasses",
        "3.100000", "100000.5", "2026-11-19T18:00:00.100000+00:00", "0100000", "1000001",
    ],
)  # fmt: skip
def test_ordinary_word_stays_as_part_of_a_longer_one(text: str) -> None:
    with known_secrets("windlass", "100000"):
        assert without_known_secrets(text) == text


def test_longer_secret_with_an_ordinary_word_is_hidden_as_a_whole() -> None:
    long = "windlass " * 100 + "end"
    with known_secrets("windlass", long, "windlass:pa55"):
        assert without_known_secrets(f"see {long}, windlass:pa55, windlass") == f"see {HIDDEN}, {HIDDEN}, {HIDDEN}"


def test_response_keeps_its_keys_numbers_and_identifiers() -> None:
    event = Event(100000, NOW, "FLEET_PAUSED", "paused by worker 100000", "worker", "worker-0", 100000, {"worker": 1})
    with known_secrets("100000", "worker", "FLEET_PAUSED"):
        shown: Mapping[str, Any] = json.loads(bytes(json_response(Event)(event).body))
    assert shown == {
        "id": 100000, "at": "2026-11-19T18:00:00.100000Z", "code": "FLEET_PAUSED",
        "reason": f"paused by {HIDDEN} {HIDDEN}", "fleet": "worker", "worker_id": "worker-0", "task_id": 100000,
        "detail": {"worker": 1}, "actor": None, "queue": None,
    }  # fmt: skip


def test_page_keeps_its_markup_and_hides_its_variables() -> None:
    context = PageContext(NOW, "1.0", notice="password windlass")
    with known_secrets("windlass", "stylesheet"):
        page = error_page(context, "Not found", "cannot log in with <windlass> stylesheet")
    assert f'<link rel="stylesheet" href="{asset("windlass.css")}">' in page
    assert f"cannot log in with &lt;{HIDDEN}&gt; {HIDDEN}" in page
    assert f"password {HIDDEN}" in page
