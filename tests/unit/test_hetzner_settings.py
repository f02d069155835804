"""Settings of Hetzner fleets: defaults, sources, and the messages for invalid ones."""

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from windlass.config_loader import load_config
from windlass.model.config import Config
from windlass.model.errors import ConfigError
from windlass.model.fleet import FleetConfig
from windlass.model.hetzner import Choice, HetznerSettings, problem_of_label
from windlass.wiring import providers


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("WINDLASS_", "HCLOUD_", "HETZNER_")):
            monkeypatch.delenv(name)


def test_hetzner_defaults_are_those_of_the_original_cluster() -> None:
    fleet = FleetConfig(provider="hetzner")
    assert (fleet.heartbeat_timeout_s, fleet.default_spawn_timeout_s, fleet.poll_interval_s) == (120, 600, 10)
    assert (fleet.max_workers, fleet.max_changes_per_cycle, fleet.concurrency) == (50, 10, 2)
    assert fleet.policy == "adaptive"
    assert fleet.hetzner.ordered == (Choice("cx23", "nbg1"), Choice("cx23", "fsn1"), Choice("cx23", "hel1"))
    assert fleet.hetzner.ssh_keys == ()
    assert fleet.stuck_timeout_s is None, "tasks may run for hours"


def test_settings_from_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "windlass.toml").write_text(
        '[fleets.crunch]\nprovider = "hetzner"\n'
        '[fleets.crunch.hetzner]\nchoices = ["cpx22@hel1"]\nnetwork_id = 7\n'
        '[fleets.crunch.hetzner.labels]\nteam = "a"\n'
    )
    monkeypatch.setenv("WINDLASS_FLEETS__CRUNCH__HETZNER__CHOICES", "cx33@fsn1, cx33@nbg1")
    monkeypatch.setenv("WINDLASS_FLEETS__CRUNCH__HETZNER__FIREWALL_IDS", "3,4")
    loaded = load_config()
    settings = loaded.config.fleets["crunch"].hetzner
    assert settings.choices == ("cx33@fsn1", "cx33@nbg1")
    assert (settings.network_id, settings.firewall_ids, settings.labels) == (7, (3, 4), {"team": "a"})
    sources = {setting.key: setting.source for setting in loaded.settings()}
    assert sources["fleets.crunch.hetzner.network_id"] == "windlass.toml"
    assert sources["fleets.crunch.hetzner.choices"] == "WINDLASS_FLEETS__CRUNCH__HETZNER__CHOICES"
    assert sources["fleets.crunch.hetzner.image"] == "default"


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (
            'choices = ["cx23"]',
            r"fleets\.f\.hetzner\.choices \(from windlass\.toml\).*'cx23' is not a server type and loc",
        ),
        ("choices = []", r"fleets\.f\.hetzner\.choices"),
        ("billing_hour_s = 7", r"fleets\.f\.hetzner\.billing_hour_s .* is 7: it must divide 3600"),
        ("network_id = 0", r"fleets\.f\.hetzner\.network_id \(from windlass\.toml\) is 0: .*greater than 0"),
        ('labels = { windlass-x = "y" }', r"the label windlass-x is reserved for windlass: choose another name"),
        ('labels = { "a b" = "y" }', r"'a b' is not a valid label"),
        ('labels = { a = "b c" }', r"'b c' is not a valid value of label a"),
        (
            "imag = 3",
            r"fleets\.f\.hetzner\.imag in windlass\.toml is not a setting: did you mean fleets\.f\.hetzner\.im",
        ),
        (
            "is_ipv6_on = false\nfirewall_ids = [1]",
            r"firewall_ids are set, but is_ipv4_on and is_ipv6_on are false",
        ),
    ],
)
def test_invalid_setting_is_refused_with_its_name(tmp_path: Path, written: str, words: str) -> None:
    (tmp_path / "windlass.toml").write_text(f'[fleets.f]\nprovider = "hetzner"\n[fleets.f.hetzner]\n{written}\n')
    with pytest.raises(ConfigError, match=words):
        load_config()


def test_settings_of_another_provider_are_refused() -> None:
    with pytest.raises(ValidationError, match="hetzner is set and provider is 'local'"):
        FleetConfig(hetzner=HetznerSettings(image="debian-12"))


@pytest.mark.parametrize(
    ("key", "value", "is_fine"),
    [
        ("a", "", True),
        ("example.com/team", "x-1_2.3", True),
        ("a" * 63, "b" * 63, True),
        ("a" * 64, "b", False),
        ("a", "b" * 64, False),
        ("-a", "b", False),
        ("a", "-b", False),
        ("a", "b_", False),
        ("hetzner.cloud/a", "b", False),
        ("", "b", False),
    ],
)
def test_labels_follow_the_rules_of_hetzner(key: str, value: str, is_fine: bool) -> None:
    assert (problem_of_label(key, value) is None) == is_fine


@pytest.mark.parametrize("name", ["HETZNER_API_TOKEN", "HCLOUD_TOKEN"])
def test_token_and_endpoint_variables_of_hcloud(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("HCLOUD_ENDPOINT", "http://127.0.0.1:9/v1/")
    config = load_config().config
    assert config.hetzner_api_token is not None
    assert config.hetzner_api_token.get_secret_value() == "secret"
    assert config.hetzner_endpoint == "http://127.0.0.1:9/v1"
    assert config.fleets == {}


def test_invalid_endpoint_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCLOUD_ENDPOINT", "127.0.0.1:9")
    with pytest.raises(ConfigError, match="hetzner_endpoint .from HCLOUD_ENDPOINT. is '127.0.0.1:9': it must be a URL"):
        load_config()


def test_missing_token_is_reported() -> None:
    fleet = FleetConfig(provider="hetzner", handler="a:b")
    with pytest.raises(ConfigError, match="the Hetzner API token is missing. Set HETZNER_API_TOKEN"):
        providers.make_provider("f", fleet, Config(fleets={"f": fleet}), "instance")


def test_servers_are_private_by_default() -> None:
    settings = HetznerSettings()
    assert (settings.is_network_on, settings.is_firewall_on) == (True, True)
    assert (settings.is_ipv4_on, settings.is_ipv6_on) == (False, True)
    with pytest.raises(ValidationError, match="servers would have no network"):
        HetznerSettings(is_network_on=False, is_ipv6_on=False)


def test_fleets_with_one_token_share_an_account_and_the_longest_timeout() -> None:
    config = Config(hetzner_api_token="secret")
    one, other = providers.hetzner_account(config, 20), providers.hetzner_account(config, 30)
    assert one is other
    assert providers.hetzner_account(config, 5).timeout_s == 30
    assert providers.hetzner_account(Config(hetzner_api_token="another"), 20) is not one


@pytest.mark.parametrize("name", ["HETZNER_API_TOKEN", "RUNPOD_API_KEY"])
def test_api_key_is_one_word_without_its_line_break(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTP libraries quote an invalid header in their error message."""
    monkeypatch.setenv(name, " abc-DEF_123\n")
    kept = getattr(load_config().config, name.lower())
    assert kept.get_secret_value() == "abc-DEF_123"
    for wrong in ("abc\ndef", "two words", "geheimnisß", "\n"):
        monkeypatch.setenv(name, wrong)
        with pytest.raises(ConfigError, match="it must be one word") as refused:
            load_config()
        assert wrong.strip() == "" or wrong not in str(refused.value)
