"""Hetzner over real connections to the emulator: checks of `windlass doctor`, and an API that stops responding."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from support.command_line import CommandLine, Completed
from support.hetzner_fixture import PUBLIC_ONLY
from windlass.model.errors import Ambiguous, Throttled, Unavailable
from windlass.model.hetzner import HetznerSettings
from windlass.model.machine import MachineRequest
from windlass.providers.hetzner.account import HetznerAccount
from windlass.providers.hetzner.provider import HetznerProvider
from windlass_emulators.hetzner import HetznerEmulator
from windlass_emulators.hetzner.settings import HetznerEmulatorSettings
from windlass_emulators.http_server import serving

TOKEN = "a-good-token"
# A port without a server: these tests need no database.
NO_DATABASE = "postgresql://u@127.0.0.1:1/d"


@pytest.fixture
def emulator() -> HetznerEmulator:
    return HetznerEmulator(
        lambda: datetime.now(UTC), HetznerEmulatorSettings(boot_s=0, action_s=0, delete_s=0, token=TOKEN)
    )


@pytest.fixture
def endpoint(emulator: HetznerEmulator) -> Iterator[str]:
    with serving(emulator) as address:
        yield f"{address}/v1"


@pytest.fixture
def windlass(tmp_path: Path, endpoint: str) -> CommandLine:
    env = {"DATABASE_URL": NO_DATABASE, "HCLOUD_ENDPOINT": endpoint, "HETZNER_API_TOKEN": TOKEN}
    return CommandLine(tmp_path, env)


def configure(windlass: CommandLine, text: str = "") -> None:
    (windlass.folder / "windlass.toml").write_text(f'[fleets.crunch]\nprovider = "hetzner"\nhandler = "a:b"\n{text}')


def findings(done: Completed) -> dict[str, tuple[str, str]]:
    return {found["check"]: (found["verdict"], found["what"]) for found in json.loads(done.out)}


def test_doctor_checks_token_server_type_and_image(windlass: CommandLine, emulator: HetznerEmulator) -> None:
    configure(windlass)
    found = findings(windlass("doctor", "--json"))
    assert found["hetzner"] == ("ok", "token valid, windlass servers: 0")
    assert found["server type"] == ("ok", "cx23 in fsn1, hel1, nbg1")
    assert found["image"] == ("ok", "Ubuntu 24.04")
    assert "network" not in found
    assert [(method, path) for _, method, path in emulator.requests] == [
        ("GET", "/v1/servers"),
        ("GET", "/v1/server_types"),
        ("GET", "/v1/images"),
    ]


@pytest.mark.parametrize(
    ("text", "env", "check", "verdict", "expected"),
    [
        ("", {"HETZNER_API_TOKEN": ""}, "hetzner", "fail", "the Hetzner API token is missing. Set HETZNER_API_TOKEN"),
        ("", {"HETZNER_API_TOKEN": "wrong"}, "hetzner", "fail", "unable to authenticate (unauthorized)"),
        ("", {"HCLOUD_ENDPOINT": "http://127.0.0.1:1/v1"}, "hetzner", "fail", "API unreachable"),
        ("", {"HETZNER_NETWORK_ID": "99"}, "network", "fail", "network 99: network with ID '99' not found (not_found)"),
        ('[fleets.crunch.hetzner]\nimage = "x"', {}, "image", "fail", "image x does not exist"),
        ('[fleets.crunch.hetzner]\nchoices = ["cx1@nbg1"]', {}, "server type", "fail", "cx1 does not exist"),
        ('[fleets.crunch.hetzner]\nchoices = ["cx23@ash"]', {}, "server type", "fail", "cx23 is not offered in ash"),
    ],
)
def test_doctor_reports_each_problem(
    windlass: CommandLine, text: str, env: dict[str, str], check: str, verdict: str, expected: str
) -> None:
    configure(windlass, text)
    done = windlass.with_env(**env)("doctor", "--json")
    assert done.code == 1
    found = findings(done)[check]
    assert found[0] == verdict
    assert expected in found[1]
    assert TOKEN not in done.out


LOCAL = '[fleets.near]\nprovider = "local"\nhandler = "a:b"\n'


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({}, ("ok", "token valid, windlass servers: 0")),
        ({"HETZNER_API_TOKEN": ""}, None),
        ({"HETZNER_API_TOKEN": "wrong"}, ("warn", "unable to authenticate (unauthorized)")),
    ],
)
def test_doctor_checks_a_vendor_with_a_key_but_without_fleets(
    windlass: CommandLine, env: dict[str, str], found: tuple[str, str] | None
) -> None:
    (windlass.folder / "windlass.toml").write_text(LOCAL)
    all_findings = findings(windlass.with_env(**env)("doctor", "--json"))
    assert all_findings.get("hetzner") == found
    assert not all_findings.keys() & {"server type", "image", "network"}


def test_doctor_warns_about_server_types_without_capacity(windlass: CommandLine, emulator: HetznerEmulator) -> None:
    configure(windlass)
    emulator.faults.no_capacity("cx23", "*")
    assert findings(windlass("doctor", "--json"))["server type"] == ("warn", "cx23 is out of stock in fsn1, hel1, nbg1")


async def test_calls_to_a_silent_api_time_out(emulator: HetznerEmulator, endpoint: str) -> None:
    # Long enough for the calls that must succeed on a busy machine.
    account = HetznerAccount(TOKEN, endpoint=endpoint, timeout_s=10.0)
    provider = HetznerProvider(
        "red",
        HetznerSettings(**PUBLIC_ONLY),
        account,
        identity="this",
        render_user_data=lambda _: "#cloud-config\n",
        list_reuse_s=0.0,
    )
    request = MachineRequest("red-0-aa", "red", 0)
    try:
        emulator.faults.next_create(times_out_after_taking_effect=True)
        with pytest.raises(Ambiguous, match="creating server red-0-aa: request timed out"):
            await provider.create(request)
        emulator.faults.next_list(held_s=30)
        with pytest.raises(Unavailable, match="listing the servers of fleet red: request timed out"):
            await provider.list_machines()
        (machine,) = await provider.list_machines()
        assert (await provider.create(request)).id == machine.id
        await provider.delete(machine)
        assert await provider.list_machines() == ()
        posts = [path for _, method, path in emulator.requests if method == "POST"]
        assert posts == ["/v1/servers"] * 2  # the second one finds the existing server
    finally:
        account.close()


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1/v1", "http://unknown.invalid/v1"])
async def test_create_without_connection_is_not_ambiguous(endpoint: str) -> None:
    account = HetznerAccount(TOKEN, endpoint=endpoint, timeout_s=30.0)
    provider = HetznerProvider(
        "red", HetznerSettings(**PUBLIC_ONLY), account, identity="this", render_user_data=lambda _: "#cloud-config\n"
    )
    try:
        with pytest.raises(Throttled, match="creating server red-0-aa: API unreachable"):
            await provider.create(MachineRequest("red-0-aa", "red", 0))
    finally:
        account.close()
