"""`windlass tokens` and `windlass audit`: scope, expiry, creator, and who did what."""

import os
import pwd
import socket
from pathlib import Path

import pytest

from support.command_line import CommandLine


@pytest.fixture
def windlass(tmp_path: Path, dsn: str) -> CommandLine:
    return CommandLine(tmp_path, {"DATABASE_URL": dsn})


def test_audit_names_the_user_of_the_operating_system(windlass: CommandLine) -> None:
    assert windlass("audit").out == "no changes\n"
    created = windlass("tokens", "create", "shop", "--role", "producer", "--queue", "renders", "--json").json
    assert created["token"].startswith("wlt_")
    assert created["expires_at"] is not None
    user = f"user:{pwd.getpwuid(os.getuid()).pw_name}@{socket.gethostname()}"
    task_id = windlass("enqueue", "renders", "null", "--json").json["id"]
    assert windlass("tasks", "show", task_id, "--json").json["owner"] == user
    assert windlass("tasks", "cancel", task_id).code == 0
    assert windlass("tokens", "revoke", "shop").code == 0
    assert windlass("tokens", "link", "--name", "ann", "--role", "viewer", "--url", "http://127.0.0.1:1").code == 0
    assert windlass("tasks", "purge", "--status", "failed", "--older-than", "0s", "--yes").out == "deleted 1 task\n"
    events = windlass("audit", "--json").json
    assert [(event["code"], event["actor"]) for event in events] == [
        ("TASKS_PURGED", user),
        ("LINK_CREATED", user),
        ("TOKEN_REVOKED", user),
        ("TASK_CANCELLED", user),
        ("TOKEN_CREATED", user),
    ]
    assert "login link for ann created, role viewer" in windlass("audit").out
    assert [event["code"] for event in windlass("audit", "--limit", 1, "--json").json] == ["TASKS_PURGED"]
    assert windlass("audit", "--actor", "token:other").out == "no changes\n"
    (token,) = windlass("tokens", "list", "--json").json
    assert (token["scope"]["queues"], token["created_by"]) == (["renders"], user)
    assert created["token"] not in windlass("tokens", "list").out + windlass("audit").out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--expires", "36550d"), "at most 36,500 days, or never"),
        (("--expires", "0s"), "a token expires after more than 0 and at most 36,500 days, or never"),
        (("--expires", "soon"), "is not a duration"),
        (("--queue", "no name"), "is not the name of a queue or fleet"),
    ],
)
def test_invalid_scope_or_expiry_is_refused(windlass: CommandLine, arguments: tuple[str, ...], sentence: str) -> None:
    done = windlass("tokens", "create", "x", "--role", "viewer", *arguments)
    assert (done.code, done.out) == (2, "")
    assert sentence in done.err


def test_token_without_expiry_must_be_asked_for(windlass: CommandLine) -> None:
    assert (
        windlass("tokens", "create", "cron", "--role", "viewer", "--expires", "never", "--json").json["expires_at"]
        is None
    )
    assert "never" in windlass("tokens", "list").out
