"""Sources of settings, their precedence, and the messages for invalid ones."""

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest

import windlass
from windlass.config_loader import load_config
from windlass.config_sources import ENVIRONMENT_ALIASES
from windlass.model.config import ApiConfig, Config
from windlass.model.errors import ConfigError
from windlass.model.fleet import FleetConfig
from windlass.model.redaction import masked
from windlass.model.urls import problem_of_database_url
from windlass.wiring.reachability import check_control_plane_url

PASSWORD = "hunter2"
EVERYWHERE = "0.0.0.0"  # noqa: S104


@pytest.fixture(autouse=True)
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("WINDLASS_") or name in ENVIRONMENT_ALIASES:
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_all_values_are_defaults_without_sources() -> None:
    assert {setting.source for setting in load_config().settings()} == {"default"}
    assert load_config().config.database_url is None


def test_later_sources_override_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "windlass.toml").write_text("max_payload_bytes = 1\n[worker]\nlease_s = 101\nheartbeat_interval_s = 11")
    monkeypatch.setenv("WINDLASS_WORKER__LEASE_S", "102")
    monkeypatch.setenv("WINDLASS_WORKER__HEARTBEAT_INTERVAL_S", "12")
    loaded = load_config(overrides={"worker.lease_s": 103.0, "worker.timeout_s": None})
    assert (loaded.config.worker.lease_s, loaded.config.worker.heartbeat_interval_s) == (103.0, 12.0)
    found = {setting.key: (setting.value, setting.source) for setting in loaded.settings()}
    assert found["max_payload_bytes"] == (1, "windlass.toml")
    assert found["worker.lease_s"] == (103.0, "command line")
    assert found["worker.heartbeat_interval_s"] == (12.0, "WINDLASS_WORKER__HEARTBEAT_INTERVAL_S")
    assert found["worker.timeout_s"] == (None, "default")


def test_prefixed_name_overrides_database_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://shared/db")
    monkeypatch.setenv("WINDLASS_DATABASE_URL", "postgresql://ours/db")
    loaded = load_config()
    assert loaded.config.database_url is not None
    assert loaded.config.database_url.get_secret_value() == "postgresql://ours/db"
    assert loaded.sources["database_url",] == "WINDLASS_DATABASE_URL"


def test_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "")
    monkeypatch.setenv("WINDLASS_WORKER__LEASE_S", "")
    assert load_config().settings() == [s for s in load_config().settings() if s.source == "default"]


def test_data_dir_option_overrides_database_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://server/db")
    assert load_config(overrides={"data_dir": Path("here")}).config.database_url is None


def test_relative_data_dir_is_relative_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "elsewhere" / "w.toml"
    file.write_text('data_dir = "data"')
    assert load_config(file).config.data_dir == tmp_path / "elsewhere" / "data"
    assert load_config(file, {"data_dir": Path("data")}).config.data_dir == tmp_path / "data"


def test_line_break_after_the_url_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://server/db\n")
    found = load_config().config.database_url
    assert found is not None
    assert found.get_secret_value() == "postgresql://server/db"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("WINDLASS_SERVICE_HOST", id="a Kubernetes service called windlass"),
        pytest.param("WINDLASS_PORT_5432_TCP_ADDR", id="its port"),
        pytest.param("WINDLASS_API_SERVICE_PORT_HTTP", id="a Kubernetes service called windlass-api"),
        pytest.param("WINDLASS_TASK_ID", id="a variable that workers set for commands"),
        pytest.param("WINDLASS_DEBUG", id="the switch for tracebacks"),
    ],
)
def test_variables_of_other_programs_are_ignored(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "tcp://10.0.0.1:5432")
    load_config()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        pytest.param("lease = 3", "lease in windlass.toml is not a setting", id="an unknown name"),
        pytest.param("[worker]\nlease = 3", "did you mean worker.lease_s?", id="a name with a typo"),
        pytest.param(
            "[worker]\nnosuch = 3", "is not a setting: docs/configuration.md lists", id="a name like no other"
        ),
        pytest.param("[woker]\nlease_s = 3", "woker in windlass.toml is not a setting", id="an unknown section"),
        pytest.param("worker = 3", "worker (from windlass.toml)", id="a value where a section belongs"),
        pytest.param("max_payload_bytes = -1", "is -1: it must be greater than 0", id="a number out of range"),
        pytest.param(
            "max_payload_bytes = 67108865",
            "must be less than or equal to 67108864",
            id="larger than the database accepts",
        ),
        pytest.param("max_payload_bytes = 'much'", "is 'much': this is not a whole number", id="a word"),
        pytest.param(
            "[fleet.a]\nmax_workers = 1", "fleet in windlass.toml is not a setting: did you mean fleets?", id="fleet"
        ),
        pytest.param("fleets = 3", "is 3: [fleets.NAME] must be a table", id="a number instead of fleets"),
        pytest.param("[fleets]\na = 1", "is 1: [fleets.a] must be a table", id="a number instead of a fleet"),
        pytest.param("worker = 1", "is 1: [worker] must be a table", id="a number instead of a section"),
        pytest.param(
            "[fleets.a]\nmax_workers = 'x'", "fleets.a.max_workers (from windlass.toml) is 'x': this is not a", id="x"
        ),
        pytest.param(
            "[fleets.a]\nhandler = 'app.generate'",
            "fleets.a.handler (from windlass.toml) is 'app.generate': not a function name: write",
            id="a handler without a function",
        ),
        pytest.param(
            "[fleets.a]\nmax_restarts = 101",
            "fleets.a.max_restarts (from windlass.toml) is 101: it must be less than or equal to 100",
            id="too many restarts",
        ),
        pytest.param(
            "[worker]\nlease_s = 3", "a lease must be at least three heartbeat intervals", id="conflicting values"
        ),
        *(
            pytest.param(
                f"[{section}]\n{key} = {value}",
                f"{section}.{key} (from windlass.toml) is {float(value)!r}: {rule}",
                id=f"{section}.{key} of {value}",
            )
            for section, key, value, rule in (
                ("retention", "complete_s", "1e12", "at most 315360000 seconds"),
                ("retention", "events_s", "inf", "at most 315360000 seconds"),
                ("worker", "lease_s", "1e300", "it must be less than or equal to 86400"),
                ("worker", "lease_s", "0.5", "it must be greater than or equal to 1"),
                ("control", "lease_s", "inf", "it must be less than or equal to 86400"),
            )
        ),
        pytest.param(
            f"[logs]\ntraces_endpoint = 'https://u:{PASSWORD}/x@otel:4318'", "it has a port that is not", id="traces"
        ),
        pytest.param("[logs]\ntraces_endpoint = 'otel:4318'", "begins with https:// or http://", id="no scheme"),
        pytest.param("a = = 1", "is not valid TOML (Invalid value (at line 1", id="not TOML"),
        pytest.param(b"a = '\xff'", "is not valid TOML (byte 5 is not UTF-8)", id="not UTF-8"),
        pytest.param(f"database_url = ['{PASSWORD}']", "database_url (from windlass.toml): write text", id="a list"),
        pytest.param(f"database_url = '{PASSWORD}'", "(from windlass.toml) is not a URL", id="not a URL"),
    ],
)
def test_invalid_file_is_refused(tmp_path: Path, content: str | bytes, sentence: str) -> None:
    (tmp_path / "windlass.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        load_config()
    assert sentence in str(caught.value)
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        pytest.param(
            f"smtp_url = 'smtp://bot:{PASSWORD}/x@mail.example.com'", "%2F", id="a / in the password of a mail server"
        ),
        pytest.param(f"smtp_url = 'smtp://bot:25/{PASSWORD}@mail'", "%2F", id="a / after digits"),
        pytest.param(f"smtp_url = 'smtp://bot:25#{PASSWORD}@mail'", "%23", id="a # in the password"),
        pytest.param(f"smtp_url = 'smtp://bot:[{PASSWORD}@mail'", "brackets", id="a bracket in the password"),
        pytest.param(f"smtp_url = 'smtp://bot:{PASSWORD} x@mail'", "contains a space", id="a space in the password"),
        pytest.param(f"smtp_url = 'smtp://bot:{PASSWORD}@mail:http'", "a port that is not", id="a port in letters"),
        pytest.param(f"smtp_url = 'smtp://bot:{PASSWORD}@a:25,b:26'", "a port that is not", id="two servers"),
        pytest.param(f"smtp_url = 'smtp://bot:{PASSWORD}@mail:0'", "a port that is not", id="port 0"),
        pytest.param(
            f"smtp_url = 'https://bot:{PASSWORD}@mail'", "begins with smtp:// or smtps://", id="not a mail server"
        ),
        pytest.param(f"smtp_url = 'smtp://bot:{PASSWORD}@'", "has no host", id="a mail server without a host"),
        pytest.param("smtp_url = 'smtp://'", "has no host", id="a scheme alone"),
        pytest.param(
            f"smtp_url = 'smtp://bot:{PASSWORD}%C3%A9@mail'", "characters other than ASCII", id="an é in the password"
        ),
        pytest.param("smtp_url = 'smtp://mail/x'", "more than a host and a port", id="a mail server with a path"),
        pytest.param("webhook_url = 'https://'", "has no host", id="a webhook without a host"),
        pytest.param(f"slack_url = 'https:///{PASSWORD}'", "has no host", id="a path alone"),
        pytest.param(f"webhook_url = 'https://u:{PASSWORD}/x@hook'", "a port that is not", id="a / in its password"),
        pytest.param(f"webhook_url = '{PASSWORD}'", "begins with https:// or http://", id="not a URL"),
        pytest.param(f'slack_url = "https://hook/\\n{PASSWORD}"', "contains a space", id="a line break in it"),
        pytest.param("email_to = ['']", "is ['']: write each as ops@example.com", id="an empty address"),
        pytest.param("email_to = ['a@b', 'ops']", "write each as ops@example.com", id="a name without a domain"),
        pytest.param("email_to = ['a@b c@d']", "write each as ops@example.com", id="two addresses in one"),
        pytest.param('email_to = ["a@b\\nBcc: c@d"]', "write each as ops@example.com", id="a header in an address"),
        pytest.param("email_from = '   '", "write it as windlass@example.com", id="an empty sender"),
        pytest.param("command = '\"abc'", "a quote in it is not closed", id="an open quote"),
        pytest.param("command = 'tell \\'", "ends in a backslash", id="a backslash at the end"),
        pytest.param("command = ' '", "has no program", id="a command without words"),
        pytest.param("command = '\"\"'", "has no program", id="a program without a name"),
        pytest.param('command = "tell \\u0000"', "contains a NUL", id="a NUL"),
    ],
)
def test_invalid_notifier_is_refused_without_its_secret(tmp_path: Path, setting: str, sentence: str) -> None:
    server = "" if setting.startswith("smtp_url") else "\nsmtp_url = 'smtp://mail.example.com'"
    (tmp_path / "windlass.toml").write_text(f"[alerts]\n{setting}{server}")
    with pytest.raises(ConfigError) as caught:
        load_config()
    assert sentence in str(caught.value)
    assert str(caught.value).startswith(f"alerts.{setting.partition(' ')[0]} (from windlass.toml)")
    assert PASSWORD not in str(caught.value)


def test_valid_notifiers_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "windlass.toml").write_text(
        """[alerts]
webhook_url = "https://user:p%2Fw@hook.example.com:8443/a?key=b"
slack_url = "http://[::1]/services/T0/B0/x"
email_to = ["ops@example.com", "On Call <on-call@example.com>", "root@localhost"]
email_from = "Windlass <windlass@example.com>"
smtp_url = "smtps://bot:p%2Fw%40@mail.example.com\\n"
command = "tell --to 'all of us'"
"""
    )
    alerts = load_config().config.alerts
    assert alerts.email_to[1] == "On Call <on-call@example.com>"
    assert alerts.smtp_url is not None
    assert alerts.smtp_url.get_secret_value() == "smtps://bot:p%2Fw%40@mail.example.com"


def test_conflicting_values_are_reported_with_their_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "windlass.toml").write_text("[fleets.default]\nmax_workers = 2\nidle_timeout_s = 1")
    monkeypatch.setenv("MIN_ACTIVE_GPUS", "3")
    with pytest.raises(ConfigError) as caught:
        load_config()
    assert str(caught.value) == (
        "fleets.default (min_workers from MIN_ACTIVE_GPUS, max_workers from windlass.toml): "
        "min_workers is 3 and max_workers is 2: min must not exceed max."
    )


def test_file_given_by_option_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="configuration file .* not found"):
        load_config(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        pytest.param("WINDLASS_WORKER__LEASE", "3", "did you mean WINDLASS_WORKER__LEASE_S?", id="an unknown name"),
        pytest.param(
            "WINDLASS_NOSUCH", "3", "is not a setting: docs/configuration.md lists all", id="a name like no other"
        ),
        pytest.param("RUNPOD_ENDPOINT", "http://127.0.0.1:8191/", "it must end in /v2, as https://api.", id="no /v2"),
        pytest.param("HCLOUD_ENDPOINT", "http://127.0.0.1:8190", "it must end in /v1, as https://api.", id="no /v1"),
        pytest.param("WINDLASS_WORKER__LEASE_S", "long", "(from WINDLASS_WORKER__LEASE_S) is 'long'", id="a bad value"),
        pytest.param("WINDLASS_WORKER", "{", "WINDLASS_WORKER in the environment is not a setting", id="a section"),
        pytest.param(
            "DATABASE_URL", f"mysql://u:{PASSWORD}@h/d", "is not the URL of a Post", id="another kind of database"
        ),
    ],
)
def test_invalid_environment_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str, sentence: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        load_config()
    assert sentence in str(caught.value)
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        pytest.param("postgresql://user:pw@host:5432/db", None, id="the usual"),
        pytest.param("postgres://host/db", None, id="the other name of the scheme"),
        pytest.param("postgresql://u@/db?host=/var/run/pg&port=5433", None, id="a socket"),
        pytest.param("postgresql://u:p%40ss@h1:5432,h2:5433/db", None, id="several hosts"),
        pytest.param("postgresql://u:p@[::1]:5432/db", None, id="IPv6"),
        pytest.param("postgresql:///db", None, id="no host"),
        pytest.param("postgresql+asyncpg://u:p@h/db", "names a driver", id="another program's driver"),
        pytest.param("host=h dbname=d", "is not a URL", id="keywords"),
        pytest.param("", "is not a URL", id="nothing"),
        pytest.param("postgresql://u:p#w@h/db", "%23", id="an unencoded #"),
        pytest.param("postgresql://u:p/w@h/db", "%2F", id="an unencoded /"),
        pytest.param("postgresql://u:p?w@h/db", "%3F", id="an unencoded ?"),
        pytest.param("postgresql://u:p@h:http/db", "port", id="a port in letters"),
        pytest.param("postgresql://u:p@h:99999/db", "port", id="a port too high"),
        pytest.param("postgresql://u:p@[::1/db", "brackets", id="half of an IPv6 address"),
    ],
)
def test_problem_of_database_url(url: str, problem: str | None) -> None:
    found = problem_of_database_url(url)
    assert (found is None) == (problem is None)
    assert (problem or "") in (found or "")


@pytest.mark.parametrize(
    "text",
    [
        f"postgresql://u:{PASSWORD}@h/db",
        f"cannot reach postgresql://u:{PASSWORD}@h:5432/db?x=1, is it up?",
        f"postgresql://u:a/b@{PASSWORD}@h/db",
        f"postgresql://h/db?user=u&password={PASSWORD}&sslmode=disable",
        f"https://token:{PASSWORD}@example.org",
    ],
)
def test_passwords_in_urls_are_masked(text: str) -> None:
    assert PASSWORD not in masked(text)
    assert "********" in masked(text)


def test_database_url_is_shown_without_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATABASE_URL", f"postgresql://u:{PASSWORD}@h:5432/db")
    (shown,) = [s.shown() for s in load_config().settings() if s.key == "database_url"]
    assert shown == "postgresql://u:********@h:5432/db"


# ------------------------------------------------------------------------------------------------------------- fleets


# Variables of the original systems (GPU orchestrator, Hetzner cluster, scaling update), and their settings.
ORIGINAL_FLEET_NAMES: list[tuple[str, str, Any]] = [
    ("MIN_ACTIVE_GPUS", "min_workers", 2),
    ("MAX_ACTIVE_GPUS", "max_workers", 12),
    ("TASKS_PER_GPU_THRESHOLD", "tasks_per_worker", 4.0),
    ("ORCHESTRATOR_POLL_SEC", "poll_interval_s", 31.0),
    ("GPU_IDLE_TIMEOUT_SEC", "heartbeat_timeout_s", 301.0),
    ("TASK_STUCK_TIMEOUT_SEC", "stuck_timeout_s", 302.0),
    ("SPAWNING_TIMEOUT_SEC", "spawn_timeout_s", 303.0),
    ("GRACEFUL_SHUTDOWN_TIMEOUT_SEC", "stop_timeout_s", 304.0),
    ("GPU_HEALTH_CHECK_TIMEOUT_SEC", "vram_stale_s", 121.0),
    ("AUTO_START_WORKER_PROCESS", "auto_start_worker", True),
    ("RGRID_MAX_WORKERS", "max_workers", 50),
    ("MACHINES_TO_KEEP_IDLE", "idle_buffer", 3),
    ("SCALE_UP_MULTIPLIER", "scale_up_multiplier", 1.5),
    ("SCALE_DOWN_MULTIPLIER", "scale_down_multiplier", 0.8),
    ("MIN_SCALING_INTERVAL_SEC", "min_scaling_interval_s", 46.0),
    ("SPAWNING_GRACE_PERIOD_SEC", "spawn_grace_s", 181.0),
    ("SCALE_DOWN_GRACE_PERIOD_SEC", "scale_down_grace_s", 61.0),
    ("GPU_OVERCAPACITY_IDLE_TIMEOUT_SEC", "idle_timeout_s", 31.0),
    ("HEARTBEAT_PROMOTION_THRESHOLD_SEC", "promotion_threshold_s", 90.0),
    ("STARTUP_GRACE_PERIOD_SEC", "startup_grace_s", 601.0),
    ("READY_NOT_CLAIMING_TIMEOUT_SEC", "not_claiming_timeout_s", 181.0),
    ("GPU_NOT_DETECTED_TIMEOUT_SEC", "gpu_not_detected_timeout_s", 299.0),
    ("MAX_WORKER_FAILURE_RATE", "max_failure_rate", 0.7),
    ("FAILURE_WINDOW_MINUTES", "failure_window_s", 420.0),
    ("MIN_WORKERS_FOR_RATE_CHECK", "min_spawns_for_rate", 6),
    ("STORAGE_CHECK_INTERVAL_CYCLES", "storage_check_interval_cycles", 11),
    ("STORAGE_MIN_FREE_GB", "storage_min_free_gb", 51),
    ("STORAGE_MAX_PERCENT_USED", "storage_max_percent_used", 86),
    ("STORAGE_EXPANSION_INCREMENT_GB", "storage_expansion_increment_gb", 52),
]
ORIGINAL_GLOBAL_NAMES = {
    "DATABASE_URL": ("database_url", "postgresql://h/d"),
    "HETZNER_API_TOKEN": ("hetzner_api_token", "secret"),
    "HETZNER_NETWORK_ID": ("hetzner_network_id", "4711"),
    "RGRID_CONTROL_PLANE_IP": ("control_plane_ip", "10.0.0.1"),
    "SUPABASE_URL": ("supabase_url", "https://p.supabase.co"),
    "SUPABASE_SERVICE_ROLE_KEY": ("supabase_service_role_key", "secret"),
    "RUNPOD_API_KEY": ("runpod_api_key", "secret"),
}

# Variables of the tools of Hetzner, Runpod and Ray.
VENDOR_NAMES = {"HCLOUD_TOKEN", "HCLOUD_ENDPOINT", "RUNPOD_ENDPOINT", "RUNPOD_SSH_PRIVATE_KEY_PATH", "RAY_ADDRESS"}


@pytest.mark.parametrize(("name", "key", "value"), [pytest.param(*row, id=row[0]) for row in ORIGINAL_FLEET_NAMES])
def test_original_variable_sets_the_default_fleet(
    monkeypatch: pytest.MonkeyPatch, name: str, key: str, value: Any
) -> None:
    written = {"FAILURE_WINDOW_MINUTES": "7", "AUTO_START_WORKER_PROCESS": "true"}.get(name, f"{value:g}")
    monkeypatch.setenv(name, written)
    loaded = load_config()
    assert getattr(loaded.config.fleets["default"], key) == value
    (found,) = [setting for setting in loaded.settings() if setting.key == f"fleets.default.{key}"]
    assert (found.value, found.source) == (value, name)
    assert value != FleetConfig.model_fields[key].default


@pytest.mark.parametrize("name", ORIGINAL_GLOBAL_NAMES)
def test_original_variable_sets_a_global_setting(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    key, value = ORIGINAL_GLOBAL_NAMES[name]
    monkeypatch.setenv("DATABASE_URL", "postgresql://h/d")
    monkeypatch.setenv(name, value)
    loaded = load_config()
    (found,) = [setting for setting in loaded.settings() if setting.key == key]
    assert found.source == name
    assert found.shown() != "secret"
    assert loaded.config.fleets == {}


def test_no_other_aliases_exist() -> None:
    assert (
        set(ENVIRONMENT_ALIASES)
        == {name for name, _, _ in ORIGINAL_FLEET_NAMES} | set(ORIGINAL_GLOBAL_NAMES) | VENDOR_NAMES
    )


def test_fleet_can_be_set_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_FLEETS__RENDERS__QUEUES", "a, b")
    monkeypatch.setenv("WINDLASS_FLEETS__RENDERS__MAX_WORKERS", "7")
    fleet = load_config().config.fleets["renders"]
    assert (fleet.queues, fleet.max_workers) == (("a", "b"), 7)
    monkeypatch.setenv("WINDLASS_FLEETS__RENDERS__MAX_WORKER", "7")
    with pytest.raises(ConfigError, match="WINDLASS_FLEETS__RENDERS__MAX_WORKER in the environment is not a setting"):
        load_config()


def test_fleet_variables_are_ignored_without_fleets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other settings of the fleet may be in a file that is not read here."""
    monkeypatch.setenv("MIN_ACTIVE_GPUS", "5")
    monkeypatch.setenv("WINDLASS_FLEETS__GPUS__PROVIDER", "runpod")
    with pytest.raises(ConfigError, match="neither runpod.image nor runpod.template_id is set"):
        load_config()
    assert load_config(has_fleets=False).config.fleets == {}
    assert windlass.Client("postgresql://user@127.0.0.1:1/nothing") is not None
    monkeypatch.setenv("WINDLASS_FLEETS__GPUS__PROVIDED", "runpod")
    with pytest.raises(ConfigError, match="WINDLASS_FLEETS__GPUS__PROVIDED in the environment is not a setting"):
        load_config(has_fleets=False)


def test_env_of_workers_is_shown_without_values(tmp_path: Path) -> None:
    file = tmp_path / "windlass.toml"
    file.write_text(f'[fleets.renders]\nqueues = ["a", "b"]\n[fleets.renders.env]\nAPI_KEY = "{PASSWORD}"')
    shown = {setting.key: (setting.shown(), setting.source) for setting in load_config().settings()}
    assert shown["fleets.renders.env"] == ("API_KEY=********", "windlass.toml")
    assert shown["fleets.renders.queues"] == ("a, b", "windlass.toml")
    assert shown["fleets.renders.max_workers"] == (4, "default")
    file.write_text(f'[fleets.renders.env]\nAPI_KEY = ["{PASSWORD}"]')
    with pytest.raises(ConfigError) as caught:
        load_config()
    assert "fleets.renders.env.API_KEY (from windlass.toml)" in str(caught.value)
    assert PASSWORD not in str(caught.value)


def test_configuration_docs_are_current() -> None:
    place = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location("configuration_docs", place / "tools" / "configuration_docs.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    is_current = (place / "docs" / "configuration.md").read_text() == tool.render()
    assert is_current, "run: python tools/configuration_docs.py"


# ---------------------------------------------------------------------------------------- URL of the control plane


def with_remote_fleet(**api: Any) -> Config:
    """A fleet on an emulated cloud."""
    ip = api.pop("control_plane_ip", None)
    config = Config(
        api=ApiConfig(**api),
        control_plane_ip=ip,
        hetzner_endpoint="http://127.0.0.1:9/v1",
        fleets={"far": FleetConfig(handler="a:b")},
    )
    remote = config.fleets["far"].model_copy(update={"provider": "hetzner"})
    return config.model_copy(update={"fleets": {"far": remote}})


@pytest.mark.parametrize(
    ("api", "url"),
    [
        ({}, None),
        ({"port": 8080}, "http://127.0.0.1:8080"),
        ({"port": 8080, "host": EVERYWHERE}, None),
        ({"port": 8080, "host": EVERYWHERE, "control_plane_ip": "10.0.0.2"}, "http://10.0.0.2:8080"),
        ({"port": 8080, "host": "::", "control_plane_ip": "fd00::2"}, "http://[fd00::2]:8080"),
        ({"port": 8080, "url": "https://w.example.com/"}, "https://w.example.com"),
        ({"url": "https://w.example.com"}, "https://w.example.com"),
        ({"control_plane_ip": "10.0.0.2"}, None),
    ],
)
async def test_machine_url_from_settings(api: dict[str, Any], url: str | None) -> None:
    config = with_remote_fleet(**api)
    assert config.machine_url == url
    if url is None:
        with pytest.raises(ConfigError, match="machines of fleet far work over HTTP, but the address"):
            await check_control_plane_url(config)
    else:
        await check_control_plane_url(config)


@pytest.mark.parametrize(
    ("api", "sentence"),
    [
        ({"port": 80, "control_plane_ip": "10.0.0.2"}, "api.host is 127.0.0.1, which only this host can reach"),
        ({"port": 80, "host": EVERYWHERE, "control_plane_ip": "8.8.8.8"}, "uses http to 8.8.8.8, which sends tokens"),
    ],
)
async def test_unreachable_control_plane_is_refused(api: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        await check_control_plane_url(with_remote_fleet(**api))


async def test_local_fleet_needs_no_url() -> None:
    await check_control_plane_url(Config(fleets={"near": FleetConfig(handler="a:b")}))


def test_unencrypted_public_url_is_refused(tmp_path: Path) -> None:
    (tmp_path / "windlass.toml").write_text('[api]\nurl = "http://w.example.com"')
    with pytest.raises(
        ConfigError, match=r"api.url \(from windlass.toml\) is .*: it uses http to w.example.com, which"
    ):
        load_config()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        pytest.param(
            'engine = "ray"', "engine is 'ray', which provider 'local' does not support", id="on plain processes"
        ),
        pytest.param(
            'provider = "ray-local"\nis_inline = true\nhandler = "a:b"',
            "is_inline cannot be used with an engine",
            id="inline",
        ),
        pytest.param(
            "[fleets.x.ray]\nnum_cpus = 2", 'ray is set and engine is not: set engine = "ray"', id="no engine"
        ),
        pytest.param(
            'provider = "ray-local"\n[fleets.x.ray.queues.other]\nnum_cpus = 2',
            "ray.queues names other, which is not among the fleet's queues",
            id="a queue it does not serve",
        ),
        pytest.param(
            'provider = "ray"\n[fleets.x.ray.resources]\nCPU = 2',
            "write num_cpus, num_gpus or memory_mb for CPU",
            id="a resource twice",
        ),
        pytest.param(
            'provider = "ray-local"\n[fleets.x.ray]\nnum_cpus = 4\nnode_cpus = 2',
            "a task of queue default needs 4 of CPU and a node has 2: raise ray.node_cpus",
            id="tasks larger than any node",
        ),
        pytest.param(
            'provider = "hetzner"\nengine = "ray"\n[fleets.x.ray.queues.default]\nresources = { disk = 1 }',
            "a task of queue default needs 1 of disk and a node has 0: raise ray.node_resources",
            id="what no node has",
        ),
    ],
)
def test_invalid_ray_settings_are_refused(content: str, sentence: str) -> None:
    Path("windlass.toml").write_text(f"[fleets.x]\n{content}")
    with pytest.raises(ConfigError) as refused:
        load_config()
    assert sentence in str(refused.value)


def test_ray_address_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    assert load_config().config.ray_address == "10.0.0.5:6379"
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.5:10001")
    with pytest.raises(ConfigError, match="Ray Client .* is not supported"):
        load_config()


def test_ray_local_fleet_has_engine_ray() -> None:
    Path("windlass.toml").write_text('[fleets.x]\nprovider = "ray-local"\n[fleets.x.ray.queues.default]\nnum_gpus = 1')
    fleet = load_config().config.fleets["x"]
    assert (fleet.engine, fleet.ray.needs_of("default").num_gpus, fleet.ray.needs_of("other").num_gpus) == ("ray", 1, 0)


@pytest.mark.parametrize(
    ("provider", "settings", "policy"),
    [
        ("local", {}, "adaptive"),
        ("hetzner", {"max_workers": 9}, "adaptive"),
        ("local", {"tasks_per_worker": 5}, "threshold"),
        ("local", {"tasks_per_worker": 5, "idle_buffer": 1}, "buffered"),
        ("local", {"scale_up_multiplier": 2}, "buffered"),
        ("local", {"clear_time_s": 60}, "clear-time"),
        ("local", {"idle_timeout_s": 60}, "buffered"),
        ("hetzner", {"idle_timeout_s": 60}, "clear-time"),
        ("local", {"idle_timeout_s": 60, "policy": "adaptive"}, "adaptive"),
        ("local", {"price_of_waiting": 1}, "adaptive"),
    ],
)
def test_settings_of_a_policy_select_it(provider: str, settings: dict[str, Any], policy: str) -> None:
    assert FleetConfig(provider=provider, **settings).policy == policy
