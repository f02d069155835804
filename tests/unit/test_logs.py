"""Log lines: secrets are masked, context variables are included, and taps receive them."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from windlass.cli import logs
from windlass.config_loader import load_config, secrets_of
from windlass.model import redaction
from windlass.model.bootstrap import BootstrapSettings
from windlass.model.config import Config
from windlass.model.fleet import FleetConfig
from windlass.model.redaction import Mask, mask_of, shown_settings
from windlass.model.runpod import RunpodSettings
from windlass.providers.local.logs import log_folder
from windlass.worker.nonblocking_stderr import NonblockingWriter

DATABASE = "postgresql://app:pa55word@db.internal:5432/app"
TOKEN = f"wlt_{'a1' * 32}"
TOML = """
runpod_api_key = "rp-secret-1"
hetzner_api_token = "hz-secret-2"
[alerts]
slack_url = "https://hooks.slack.example/T0/B0/sl4ckpath"
smtp_url = "smtp://mailer:mailpa55@mx.example:587"
email_to = ["ops@example.com"]
[fleets.gpus]
handler = "app:work"
env = { API_KEY = "handler-secret-3", MODE = "fast-and-loose" }
"""
SECRETS = ("rp-secret-1", "hz-secret-2", "sl4ckpath", "mailpa55", "handler-secret-3", "pa55word", "a1a1a1")


class StderrFile:
    """A file that replaces standard error."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("wb+", buffering=0)
        self.outlet = NonblockingWriter(self._file.fileno())

    def getvalue(self) -> str:
        assert self.outlet.drain(20.0)
        return Path(self._file.name).read_text()

    def close(self) -> None:
        self._file.close()


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StderrFile]:
    """JSON logging as the program configures it, into a file. Restored afterwards."""
    written = StderrFile(tmp_path / "stderr")
    monkeypatch.setattr(logs, "standard_error", written.outlet)
    monkeypatch.setattr(redaction, "_known", redaction.Mask())
    logs.configure_logs("json")
    yield written
    structlog.contextvars.clear_contextvars()
    structlog.reset_defaults()
    assert written.outlet.drain(20.0)
    written.close()


def lines(stream: StderrFile) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_secrets_are_masked_in_every_part_of_a_log_line(stream: StderrFile, tmp_path: Path) -> None:
    file = tmp_path / "windlass.toml"
    file.write_text(f'database_url = "{DATABASE}"\n{TOML}')
    loaded = load_config(file, {})
    logs.hide(secrets_of(loaded.config))
    log = structlog.get_logger("test")
    everything = " ".join(
        [DATABASE, TOKEN, "rp-secret-1 hz-secret-2", "https://hooks.slack.example/T0/B0/sl4ckpath",
         "smtp://mailer:mailpa55@mx.example:587", "handler-secret-3"]
    )  # fmt: skip
    log.warning(everything, plain=everything, nested={"a": [everything, (everything,)]}, error=ValueError(everything))
    try:
        int(everything)
    except ValueError:
        log.exception("parse failed")
    text = stream.getvalue()
    assert len(lines(stream)) == 2
    for secret in SECRETS:
        assert secret not in text, secret
    assert "db.internal" in text
    assert "wlt_********" in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("+ export RUNPOD_API_KEY=rpa_ABC", "+ export RUNPOD_API_KEY=********"),
        ("HF_TOKEN='it'\\''s mine' PGPASSWORD=\"a b\" run", "HF_TOKEN=******** PGPASSWORD=******** run"),
        ("MODE=fast KEYS=", "MODE=fast KEYS="),
        ('SSH_SECRET="one\ntwo" three', "SSH_SECRET=******** three"),
        ("unique_key=abc", "unique_key=abc"),
        ("A_KEY='never closed\nthe cause", "A_KEY=********\nthe cause"),
        ("A_KEY=ab'c d'e f", "A_KEY=******** f"),
        ('{"cmd": "run with HF_TOKEN=abc", "error": "boom"}', '{"cmd": "run with HF_TOKEN=********", "error": "boom"}'),
        ('{"cmd": "HF_TOKEN=\\"a b\\" run", "error": "b"}', '{"cmd": "HF_TOKEN=******** run", "error": "b"}'),
        ('{"cmd": "run with HF_TOKEN=", "error": "boom"}', '{"cmd": "run with HF_TOKEN=", "error": "boom"}'),
        ('{"cmd": "HF_TOKEN=********", "error": "boom"}', '{"cmd": "HF_TOKEN=********", "error": "boom"}'),
    ],
)
def test_values_of_secret_variables_in_shell_output_are_masked(text: str, shown: str) -> None:
    assert Mask()(text) == shown


async def test_worker_logs_are_read_without_secrets(tmp_path: Path) -> None:
    folder = log_folder(tmp_path, "gpus", mask_of(["handler-secret-3"]))
    os.close(folder.create("w0"))
    line = f"cannot reach {DATABASE} with handler-secret-3 and {TOKEN}"
    folder.path_of("w0").write_text(f"{line}\n" + "x" * 280 + " handler-secret-3 is cut in the middle\n")
    first, last = [text async for text in folder.read("w0", 2)]
    assert first == "cannot reach postgresql://app:********@db.internal:5432/app with ******** and wlt_********"
    assert last.endswith(" ******** is cut in the middle")
    assert "handler" not in folder.last_line("w0")
    folder.path_of("w0").write_text(json.dumps({"level": "error", "event": "connect failed", "error": line}))
    assert folder.last_line("w0").startswith("last error: connect failed: cannot reach postgresql://app:********@db")
    assert not any(secret in folder.last_line("w0") for secret in SECRETS)


def test_shown_settings_mask_env_values() -> None:
    pods = RunpodSettings(image="app:1", env={"HF_TOKEN": "hf-secret-4"})
    fleet = FleetConfig(provider="runpod", handler="app:work", env={"MODE": "fast"}, runpod=pods)
    shown = shown_settings(fleet.model_dump(mode="json"))
    assert (shown["env"], shown["runpod"]["env"]) == ({"MODE": "********"}, {"HF_TOKEN": "********"})
    assert (shown["provider"], shown["handler"], shown["max_workers"]) == ("runpod", "app:work", fleet.max_workers)
    assert "hf-secret-4" in secrets_of(Config(fleets={"pods": fleet}))


def test_tokens_in_addresses_of_a_bootstrap_are_secrets() -> None:
    bootstrap = BootstrapSettings(
        requirements=("--extra-index-url https://ci:pa55%2Bword@pypi.example/simple",),
        setup=("git clone https://ghp-token@git.example/app && curl https://get.example",),
    )
    fleet = FleetConfig(provider="hetzner", handler="app:work", bootstrap=bootstrap)
    assert secrets_of(Config(fleets={"far": fleet})) == {"pa55%2Bword", "pa55+word", "ghp-token"}


def test_shown_settings_mask_passwords_in_urls_and_tokens() -> None:
    setup = ("curl https://me:pa55word@get.example/setup | sh", f"join {TOKEN}")
    settings = {"bootstrap": BootstrapSettings(setup=setup).model_dump(mode="json")}
    shown = shown_settings(settings)
    assert shown["bootstrap"]["setup"] == ["curl https://me:********@get.example/setup | sh", "join wlt_********"]


def test_other_values_are_not_masked(stream: StderrFile, tmp_path: Path) -> None:
    file = tmp_path / "windlass.toml"
    file.write_text(TOML)
    logs.hide(secrets_of(load_config(file, {"data_dir": tmp_path}).config))
    structlog.get_logger("test").info("the mode is fast-and-loose", count=3, ratio=0.5, names=["a", "b"])
    (line,) = lines(stream)
    assert line["event"] == "the mode is fast-and-loose"
    assert (line["count"], line["ratio"], line["names"]) == (3, 0.5, ["a", "b"])


def test_context_variables_are_in_log_lines(stream: StderrFile) -> None:
    structlog.contextvars.bind_contextvars(fleet="gpus", cycle=7)
    structlog.get_logger("test").info("machine refused")
    (line,) = lines(stream)
    assert (line["fleet"], line["cycle"], line["level"]) == ("gpus", 7, "info")


def test_tap_receives_masked_lines_until_removed(stream: StderrFile) -> None:
    tapped: list[Any] = []
    untap = logs.add_tap(tapped.append)
    log = structlog.get_logger("test")
    log.info("one", token=TOKEN)
    untap()
    log.info("two")
    assert [(line["event"], line.get("token")) for line in tapped] == [("one", "wlt_********")]
    assert len(lines(stream)) == 2
