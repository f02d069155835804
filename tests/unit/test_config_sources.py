"""Settings from `.env`, secret files and commands, and the variables of the original orchestrators."""

import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog

from support.snapshots import of_kind, snapshot, worker
from windlass import config_sources
from windlass.cli.config import log_settings
from windlass.config_loader import Loaded, load_config, secrets_of
from windlass.config_sources import ENVIRONMENT_ALIASES, fields, secret_variables, variable_of
from windlass.model.action import Spawn
from windlass.model.config import Config
from windlass.model.errors import ConfigError
from windlass.model.redaction import mask_of
from windlass.model.snapshot import WorkerView
from windlass.policy.plan import plan

SECRET = "s3cret/of+the key&more"
SECRET_KEYS = [key for key, info in fields(Config) if "SecretStr" in str(info.annotation)]
RUNPOD = "[fleets.{name}]\nprovider = 'runpod'\nhandler = 'app:run'\nrunpod.image = 'a/b:1'\n"


@pytest.fixture(autouse=True)
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("WINDLASS_") or name in ENVIRONMENT_ALIASES:
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config_sources, "SECRETS_DIR", tmp_path / "no-secrets")


def runpod_key(loaded: Loaded) -> str | None:
    key = loaded.config.runpod_api_key
    return key.get_secret_value() if key is not None else None


def test_dotenv_has_the_lowest_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text(
        "# comment\nexport RUNPOD_API_KEY='from-dotenv'\nWINDLASS_WORKER__LEASE_S=100\nOTHER_APP=1\nMAX_ACTIVE_GPUS=3\n"
    )
    loaded = load_config()
    assert runpod_key(loaded) == "from-dotenv"
    assert loaded.source("runpod_api_key") == "RUNPOD_API_KEY in .env"
    assert loaded.config.fleets["default"].max_workers == 3
    assert "RUNPOD_API_KEY" not in os.environ
    (tmp_path / "windlass.toml").write_text("runpod_api_key = 'from-file'\n[worker]\nlease_s = 200\n")
    assert runpod_key(load_config()) == "from-file"
    assert load_config().config.worker.lease_s == 200
    monkeypatch.setenv("RUNPOD_API_KEY", "from-environment")
    assert runpod_key(load_config()) == "from-environment"


def test_unknown_setting_in_dotenv_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("WINDLASS_WORKER__LEASE=3\n")
    with pytest.raises(ConfigError, match=r"WINDLASS_WORKER__LEASE in \.env is not a setting: did you mean"):
        load_config()
    (tmp_path / ".env").write_bytes(b"A=\xff\n")
    with pytest.raises(ConfigError, match=r"\.env is not UTF-8"):
        load_config()


@pytest.mark.parametrize("name", ["RUNPOD_API_KEY_FILE", "WINDLASS_RUNPOD_API_KEY_FILE"])
def test_secret_is_read_from_the_named_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "key").write_text("rp_123\n")
    monkeypatch.setenv(name, str(tmp_path / "key"))
    assert runpod_key(load_config()) == "rp_123"
    assert load_config().source("runpod_api_key") == name
    assert name in secret_variables()
    monkeypatch.setenv(name.removesuffix("_FILE"), "other")
    with pytest.raises(ConfigError, match=f"both {name.removesuffix('_FILE')} and {name} are set"):
        load_config()


def valid_secret(key: tuple[str, ...]) -> str:
    return {"database_url": "postgresql://u:pw@h/db", "smtp_url": "smtp://u:pw@h"}.get(key[-1], "https://h/a-secret")


@pytest.mark.parametrize("source", ["environment", "named file", "systemd credential", "mounted", "command", ".env"])
@pytest.mark.parametrize("key", SECRET_KEYS, ids=".".join)
def test_every_secret_setting_has_every_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: tuple[str, ...], source: str
) -> None:
    variable = variable_of(key)
    value = valid_secret(key)
    folder = tmp_path / "secrets"
    folder.mkdir()
    file = folder / variable
    file.write_text(f"{value}\n")
    match source:
        case "environment":
            monkeypatch.setenv(variable, value)
        case "named file":
            monkeypatch.setenv(f"{variable}_FILE", str(file))
        case "systemd credential":
            monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(folder))
        case "mounted":  # by Docker or Kubernetes
            monkeypatch.setattr(config_sources, "SECRETS_DIR", folder)
        case "command":
            monkeypatch.setenv(variable, f"cmd:cat {file}")
        case ".env":
            (tmp_path / ".env").write_text(f"{variable}={value}\n")
    section: Any = load_config().config
    for name in key:
        section = getattr(section, name)
    assert section.get_secret_value() == value


SECRET_VARIABLES = {name: key for name, key in secret_variables().items() if not name.endswith("_FILE")}


@pytest.mark.parametrize("variable", sorted(SECRET_VARIABLES))
def test_each_file_of_a_systemd_folder_is_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """`LoadCredential=WINDLASS:/etc/windlass` passes the file DATABASE_URL as WINDLASS_DATABASE_URL."""
    (tmp_path / f"WINDLASS_{variable}").write_text(valid_secret(SECRET_VARIABLES[variable]))
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert load_config().source(".".join(SECRET_VARIABLES[variable])) == str(tmp_path / f"WINDLASS_{variable}")


def test_unreadable_secret_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL_FILE", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="cannot read the secret in .*missing: No such file"):
        load_config()
    monkeypatch.setenv("DATABASE_URL_FILE", str(tmp_path / "empty"))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="empty has no text"):
        load_config()
    (tmp_path / "empty").write_bytes(b"x" * 70_000)
    with pytest.raises(ConfigError, match="has more than 65,536 bytes"):
        load_config()


def test_secrets_are_read_from_mounted_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker, systemd = tmp_path / "docker", tmp_path / "systemd"
    docker.mkdir()
    systemd.mkdir()
    (docker / "DATABASE_URL").write_text("postgresql://docker/db\n")
    (docker / "hcloud_token").write_text("hc_1\n")
    monkeypatch.setattr(config_sources, "SECRETS_DIR", docker)
    loaded = load_config()
    assert loaded.config.database_url is not None
    assert loaded.config.database_url.get_secret_value() == "postgresql://docker/db"
    assert loaded.source("hetzner_api_token") == str(docker / "hcloud_token")
    (systemd / "database_url").write_text("postgresql://systemd/db")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(systemd))
    assert load_config().source("database_url") == str(systemd / "database_url")
    monkeypatch.setenv("DATABASE_URL", "postgresql://environment/db")
    assert load_config().source("database_url") == "DATABASE_URL"


def test_secret_is_read_from_a_command(tmp_path: Path) -> None:
    vault = tmp_path / "vault"
    vault.write_text(f"#!{sys.executable}\nimport sys\nprint('from-' + sys.argv[1])\n")
    vault.chmod(vault.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "windlass.toml").write_text(
        f"runpod_api_key = 'cmd:{vault} runpod'\n[fleets.a]\nhandler = 'app:run'\nenv.HF_TOKEN = 'cmd:{vault} hf'\n"
    )
    loaded = load_config()
    assert runpod_key(loaded) == "from-runpod"
    assert loaded.config.fleets["a"].env["HF_TOKEN"] == "from-hf"
    assert {"from-runpod", "from-hf"} <= secrets_of(loaded.config)
    # Workers ignore fleet settings, and must not run their commands.
    (tmp_path / "windlass.toml").write_text("[fleets.a]\nenv.HF_TOKEN = 'cmd:/missing'\n")
    assert load_config(has_fleets=False).config.fleets == {}


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        pytest.param("/missing/program", r"cannot run /missing/program: No such file", id="a missing program"),
        pytest.param(
            "sh -c 'echo secret-detail >&2; exit 3'", r"sh failed with exit code 3\. Run it by hand", id="fails"
        ),
        pytest.param("true", r"true printed no text", id="prints nothing"),
        pytest.param("echo 'open", r"is not a command: No closing quotation", id="an open quote"),
        pytest.param("", r"names no program after cmd:", id="no program"),
    ],
)
def test_bad_command_is_refused(monkeypatch: pytest.MonkeyPatch, command: str, sentence: str) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", f"cmd:{command}")
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_config()
    assert "secret-detail" not in str(caught.value)


def test_command_that_hangs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_sources, "COMMAND_TIMEOUT_S", 0.2)
    monkeypatch.setenv("RUNPOD_API_KEY", "cmd:sleep 600")
    with pytest.raises(ConfigError, match="sleep took over 0.2 s"):
        load_config()


def test_original_names_set_the_only_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "windlass.toml").write_text(RUNPOD.format(name="gpus"))
    monkeypatch.setenv("MAX_ACTIVE_GPUS", "7")
    loaded = load_config()
    assert list(loaded.config.fleets) == ["gpus"]
    assert loaded.config.fleets["gpus"].max_workers == 7
    assert loaded.warnings == ()


def test_original_names_are_reported_with_several_fleets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "windlass.toml").write_text(RUNPOD.format(name="a") + RUNPOD.format(name="b"))
    monkeypatch.setenv("MAX_ACTIVE_GPUS", "7")
    loaded = load_config()
    assert set(loaded.config.fleets) == {"a", "b"}
    assert loaded.warnings == (
        "MAX_ACTIVE_GPUS in the environment has no effect, because there are several fleets: "
        "set max_workers of the fleet that it is meant for",
    )


def test_two_names_of_one_setting_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "windlass.toml").write_text(RUNPOD.format(name="gpus"))
    monkeypatch.setenv("RGRID_MAX_WORKERS", "3")
    monkeypatch.setenv("MAX_ACTIVE_GPUS", "7")
    loaded = load_config()
    assert loaded.config.fleets["gpus"].max_workers == 7
    assert loaded.warnings == (
        "RGRID_MAX_WORKERS in the environment is overridden by MAX_ACTIVE_GPUS, which sets fleets.gpus.max_workers",
    )


@pytest.mark.parametrize(
    ("variables", "policy", "warned"),
    [
        pytest.param(("TASKS_PER_GPU_THRESHOLD",), "threshold", (), id="the threshold alone"),
        pytest.param(("MACHINES_TO_KEEP_IDLE",), "buffered", (), id="the buffer alone"),
        pytest.param(("TASKS_PER_GPU_THRESHOLD", "SCALE_UP_MULTIPLIER"), "buffered", ("tasks_per_worker",), id="both"),
    ],
)
def test_original_names_choose_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: tuple[str, ...], policy: str, warned: tuple[str, ...]
) -> None:
    (tmp_path / "windlass.toml").write_text(RUNPOD.format(name="gpus"))
    for name in variables:
        monkeypatch.setenv(name, "2")
    loaded = load_config()
    assert loaded.config.fleets["gpus"].policy == policy
    assert len(loaded.warnings) == len(warned)
    for name, warning in zip(warned, loaded.warnings, strict=True):
        assert f"fleets.gpus.{name} (from TASKS_PER_GPU_THRESHOLD) has no effect with policy {policy}" in warning


# The .env of the first original orchestrator, with the address of the database, and its scaling parameters alone.
FIRST_ENV = """\
SUPABASE_URL=https://abc.supabase.co
SUPABASE_SERVICE_ROLE_KEY=srk
RUNPOD_API_KEY=rp_key
DATABASE_URL=postgresql://h/d
MIN_ACTIVE_GPUS=2
MAX_ACTIVE_GPUS=10
TASKS_PER_GPU_THRESHOLD=3
GPU_IDLE_TIMEOUT_SEC=300
TASK_STUCK_TIMEOUT_SEC=300
SPAWNING_TIMEOUT_SEC=300
GPU_HEALTH_CHECK_TIMEOUT_SEC=120
GRACEFUL_SHUTDOWN_TIMEOUT_SEC=600
ORCHESTRATOR_POLL_SEC=30
"""


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param(FIRST_ENV, id="all of its variables"),
        pytest.param("MIN_ACTIVE_GPUS=2\nMAX_ACTIVE_GPUS=10\n", id="its limits alone"),
        pytest.param("MAX_ACTIVE_GPUS=10\n", id="one limit alone"),
    ],
)
def test_first_original_env_gives_four_gpus_for_ten_tasks(tmp_path: Path, variables: str) -> None:
    image = "WINDLASS_FLEETS__DEFAULT__PROVIDER=runpod\nWINDLASS_FLEETS__DEFAULT__RUNPOD__IMAGE=a/b:1\n"
    (tmp_path / ".env").write_text(variables + image)
    loaded = load_config()
    fleet = loaded.config.fleets["default"]
    assert (fleet.policy, fleet.min_workers, fleet.max_workers) == ("threshold", 2, 10)
    supabase = [name for name in ("SUPABASE_URL", "SUPABASE_SERVICE_ROLE_KEY") if name in variables]
    assert [
        f"(from {name} in .env) has no effect" in line for name, line in zip(supabase, loaded.warnings, strict=True)
    ] == [True] * len(supabase)
    workers: list[WorkerView] = []
    while found := of_kind(plan(snapshot(*workers, queued=10), fleet).actions, Spawn):
        workers += [worker(f"w{len(workers) + n}", len(workers) + n, "spawning") for n in range(len(found))]
        assert len(workers) <= 4
    assert len(workers) == 4


def test_first_original_env_without_a_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(FIRST_ENV.replace("DATABASE_URL", "#"))
    with pytest.raises(ConfigError, match="DATABASE_URL"):
        load_config()


@pytest.mark.parametrize(
    ("variables", "policy"),
    [
        pytest.param({"MAX_ACTIVE_GPUS": "9"}, "threshold", id="a limit alone"),
        pytest.param({"MIN_ACTIVE_GPUS": "1"}, "threshold", id="the other limit"),
        pytest.param({"MAX_ACTIVE_GPUS": "9", "SPAWNING_GRACE_PERIOD_SEC": "180"}, "buffered", id="later names"),
    ],
)
def test_original_limits_choose_the_policy_of_a_runpod_fleet_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], policy: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "windlass.toml").write_text(RUNPOD.format(name="gpus"))
    assert load_config().config.fleets["gpus"].policy == policy
    # A policy or a setting of a policy in the file decides; so does a provider that the originals did not have.
    (tmp_path / "windlass.toml").write_text(RUNPOD.format(name="gpus") + "policy = 'adaptive'\n")
    assert load_config().config.fleets["gpus"].policy == "adaptive"
    (tmp_path / "windlass.toml").write_text(RUNPOD.format(name="gpus") + "scale_up_multiplier = 1.5\n")
    assert load_config().config.fleets["gpus"].policy == "buffered"
    (tmp_path / "windlass.toml").write_text("[fleets.gpus]\nhandler = 'app:run'\n")
    assert load_config().config.fleets["gpus"].policy == ("adaptive" if policy == "threshold" else policy)


@pytest.mark.parametrize(
    ("variables", "policy"),
    [
        pytest.param({"MAX_ACTIVE_GPUS": "9", "SPAWNING_GRACE_PERIOD_SEC": "180"}, "buffered", id="later names"),
        pytest.param({"MAX_ACTIVE_GPUS": "9", "SCALE_UP_MULTIPLIER": "1.5"}, "buffered", id="a multiplier"),
        pytest.param({"RGRID_MAX_WORKERS": "9"}, "adaptive", id="a name of the Hetzner cluster"),
        pytest.param(
            {"MAX_ACTIVE_GPUS": "9", "WINDLASS_FLEETS__DEFAULT__WAIT_GOAL_S": "60"},
            "adaptive",
            id="a setting of Windlass",
        ),
    ],
)
def test_limits_among_other_names_do_not_choose_threshold(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], policy: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    loaded = load_config()
    assert loaded.config.fleets["default"].policy == policy
    assert loaded.warnings == ()


LOCAL = "[fleets.a]\nhandler = 'app:run'\n"
RAY = "[fleets.a]\nprovider = 'ray'\nhandler = 'app:run'\n"


@pytest.mark.parametrize(
    ("file", "name", "reason"),
    [
        (LOCAL, "AUTO_START_WORKER_PROCESS", "fleets.a.auto_start_worker {} has no effect with provider local: remove it"),  # noqa: E501
        (LOCAL, "STORAGE_MIN_FREE_GB", "fleets.a.storage_min_free_gb {} has no effect with provider local: remove it"),
        (
            LOCAL,
            "GPU_NOT_DETECTED_TIMEOUT_SEC",
            "fleets.a.gpu_not_detected_timeout_s {} has no effect without a GPU: remove it, or set has_gpu = true",
        ),
        (
            RAY,
            "MAX_ACTIVE_GPUS",
            "fleets.a.max_workers {} has no effect with provider ray, which spawns no workers: remove it",
        ),
        (LOCAL, "SUPABASE_URL", "supabase_url {} has no effect: windlass connects with database_url"),
        (
            LOCAL,
            "SUPABASE_SERVICE_ROLE_KEY",
            "supabase_service_role_key {} has no effect: windlass connects with database_url: "
            "remove it from this environment",
        ),
        (LOCAL, "HETZNER_NETWORK_ID", "hetzner_network_id {} has no effect: no fleet has provider hetzner"),
        (LOCAL, "RGRID_CONTROL_PLANE_IP", "control_plane_ip {} has no effect: no fleet has remote workers"),
    ],
)  # fmt: skip
def test_ignored_variable_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, name: str, reason: str
) -> None:
    (tmp_path / "windlass.toml").write_text("database_url = 'postgresql://h/d'\n" + file)
    monkeypatch.setenv(name, "1")
    assert load_config().warnings == (reason.format(f"(from {name})"),)


# A valid value of each original name.
ORIGINAL_VALUES = {name: "300" for name, key in ENVIRONMENT_ALIASES.items() if key[0] == "fleets"} | {
    "AUTO_START_WORKER_PROCESS": "false",
    "MAX_WORKER_FAILURE_RATE": "0.5",
    "SCALE_DOWN_MULTIPLIER": "0.5",
    "STORAGE_MAX_PERCENT_USED": "90",
    "MIN_ACTIVE_GPUS": "2",
}


def test_every_original_name_acts_or_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On each provider, every name is the source of a value, and each value that nothing reads has a warning."""
    names = list(ORIGINAL_VALUES)
    for name, value in ORIGINAL_VALUES.items():
        monkeypatch.setenv(name, value)
    ignored = {}
    runpod = RUNPOD.format(name="a")
    with_volume = runpod + "runpod.network_volume_id = 'v'\n"
    for kind, section in (("local", LOCAL), ("ray", RAY), ("runpod", runpod), ("with a volume", with_volume)):
        (tmp_path / "windlass.toml").write_text(section)
        loaded = load_config()
        sources = {setting.source for setting in loaded.settings()}
        ignored[kind] = {name for name in names if any(f"(from {name})" in line for line in loaded.warnings)}
        assert set(names) - sources == {"RGRID_MAX_WORKERS"}
        assert loaded.warnings[0].startswith("RGRID_MAX_WORKERS in the environment is overridden by MAX_ACTIVE_GPUS")
    volume = {name for name in names if name.startswith("STORAGE_")}
    storage = volume | {"AUTO_START_WORKER_PROCESS"}
    gpu = {"STARTUP_GRACE_PERIOD_SEC", "GPU_NOT_DETECTED_TIMEOUT_SEC", "GPU_HEALTH_CHECK_TIMEOUT_SEC"}
    assert ignored["with a volume"] == {"TASKS_PER_GPU_THRESHOLD"}
    assert ignored["runpod"] == {"TASKS_PER_GPU_THRESHOLD"} | volume
    assert len(volume) == 4
    assert ignored["local"] == {"TASKS_PER_GPU_THRESHOLD"} | storage | gpu
    assert ignored["ray"] > storage | gpu | {"MIN_ACTIVE_GPUS", "MAX_ACTIVE_GPUS", "MACHINES_TO_KEEP_IDLE"}


@pytest.mark.parametrize(
    ("given_in", "overridden_by"),
    [
        ("in the environment", "WINDLASS_FLEETS__A__{}"),
        ("in .env", "windlass.toml"),
        ("in .env", "WINDLASS_FLEETS__A__{}"),
        ("in the environment", "the command line"),
        ("in .env", "the command line"),
    ],
)
def test_every_original_name_that_is_overridden_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_in: str, overridden_by: str
) -> None:
    settings = {name: ENVIRONMENT_ALIASES[name][-1] for name in ORIGINAL_VALUES}
    stronger = {setting: ORIGINAL_VALUES[name] for name, setting in settings.items()}
    in_file = "".join(f"{setting} = {value}\n" for setting, value in stronger.items())
    (tmp_path / "windlass.toml").write_text(
        RUNPOD.format(name="a") + (in_file if overridden_by == "windlass.toml" else "")
    )
    if given_in == "in .env":
        (tmp_path / ".env").write_text("".join(f"{name}={value}\n" for name, value in ORIGINAL_VALUES.items()))
    else:
        for name, value in ORIGINAL_VALUES.items():
            monkeypatch.setenv(name, value)
    if overridden_by.startswith("WINDLASS_"):
        for setting, value in stronger.items():
            monkeypatch.setenv(overridden_by.format(setting.upper()), value)
    options = {f"fleets.a.{setting}": value for setting, value in stronger.items()}
    loaded = load_config(overrides=options if overridden_by == "the command line" else {})
    for name, setting in settings.items():
        # Two original names set this one.
        by = "MAX_ACTIVE_GPUS" if name == "RGRID_MAX_WORKERS" else overridden_by.format(setting.upper())
        sentence = f"{name} {given_in} is overridden by {by}"
        assert [line for line in loaded.warnings if line.startswith(sentence)], (sentence, loaded.warnings)
    assert not ORIGINAL_VALUES.keys() & {setting.source for setting in loaded.settings()}


def test_variable_of_the_environment_overrides_itself_in_dotenv_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".env").write_text("MAX_ACTIVE_GPUS=3\n")
    monkeypatch.setenv("MAX_ACTIVE_GPUS", "4")
    loaded = load_config()
    assert loaded.config.fleets["default"].max_workers == 4
    assert loaded.warnings == ()


def test_policy_in_the_file_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "windlass.toml").write_text(RUNPOD.format(name="gpus") + "policy = 'clear-time'\n")
    monkeypatch.setenv("TASKS_PER_GPU_THRESHOLD", "3")
    loaded = load_config()
    assert loaded.config.fleets["gpus"].policy == "clear-time"
    assert ["tasks_per_worker" in warning for warning in loaded.warnings] == [True]


@pytest.mark.parametrize("is_in_dotenv", [False, True])
def test_minimum_is_two_only_for_a_fleet_with_original_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_dotenv: bool
) -> None:
    monkeypatch.setenv("WINDLASS_FLEETS__DEFAULT__PROVIDER", "runpod")
    monkeypatch.setenv("WINDLASS_FLEETS__DEFAULT__RUNPOD__IMAGE", "a/b:1")
    # Not a setting of a fleet: it says nothing about the number of machines.
    monkeypatch.setenv("RUNPOD_API_KEY", "rp_1")
    assert load_config().config.fleets["default"].min_workers == 0
    if is_in_dotenv:
        (tmp_path / ".env").write_text("MAX_ACTIVE_GPUS=10\n")
    else:
        monkeypatch.setenv("MAX_ACTIVE_GPUS", "10")
    assert load_config().config.fleets["default"].min_workers == 2
    monkeypatch.setenv("MIN_ACTIVE_GPUS", "1")
    assert load_config().config.fleets["default"].min_workers == 1
    monkeypatch.delenv("MIN_ACTIVE_GPUS")
    (tmp_path / "windlass.toml").write_text("[fleets.default]\nhandler = 'app:run'\n")
    assert load_config().config.fleets["default"].min_workers == 0


@pytest.mark.parametrize("is_terminal", [False, True])
def test_all_settings_are_logged_with_their_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    # The renderer decides what a person sees of the entry, not the kind of standard error: it may write JSON there.
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    (tmp_path / "windlass.toml").write_text(
        "[fleets.a]\nhandler = 'app:run'\nclear_time_s = 7\npolicy = 'buffered'\nenv.A = 'x-marker'\n"
    )
    monkeypatch.setenv("RUNPOD_API_KEY", "rp_marker_123")
    monkeypatch.setenv("DATABASE_URL", "postgresql://u:pw-marker@h/d")
    with structlog.testing.capture_logs() as lines:
        log_settings(load_config())
    settings = lines[0]["settings"]
    assert settings["runpod_api_key"] == {"value": "********", "source": "RUNPOD_API_KEY"}
    assert settings["worker.lease_s"] == {"value": 30.0, "source": "default"}
    assert settings["fleets.a.clear_time_s"] == {"value": 7.0, "source": "windlass.toml"}
    assert "marker" not in str(lines)
    assert lines[1]["event"] == "ignore setting"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("key s3cret/of+the key&more", id="plain"),
        pytest.param("key=s3cret%2Fof%2Bthe%20key%26more", id="URL"),
        pytest.param("key=s3cret%2Fof%2Bthe+key%26more", id="form"),
        pytest.param(r'"s3cret\/of+the key&more"', id="JSON with escaped slashes"),
        pytest.param("7333637265742f6f662b746865206b6579266d6f7265", id="hexadecimal"),
        pytest.param("czNjcmV0L29mK3RoZSBrZXkmbW9yZQ==", id="base64"),
        pytest.param("dXNlcjpzM2NyZXQvb2YrdGhlIGtleSZtb3Jl", id="base64 of user:secret"),
        pytest.param("dTpzM2NyZXQvb2YrdGhlIGtleSZtb3JlPQ==", id="base64 of u:secret="),
        pytest.param("YXUxOnMzY3JldC9vZit0aGUga2V5Jm1vcmU=", id="base64 of au1:secret"),
    ],
)
def test_encoded_secret_is_masked(text: str) -> None:
    shown = mask_of([SECRET])(text)
    assert "********" in shown
    for part in ("s3cret", "7333637265", "L29mK3Ro", "YrdGhlIG", "9vZit0aG"):
        assert part not in shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("pip --extra-index-url https://T0KEN@pypi.org/simple", "https://********@pypi.org", id="index"),
        pytest.param("git+https://ghp_abc@github.com/a/b", "git+https://********@github.com/a/b", id="a forge"),
        pytest.param("ssh://git@github.com/a", "ssh://git@github.com/a", id="a user of SSH is no secret"),
        pytest.param("postgresql://app@db/app", "postgresql://app@db/app", id="a user of a database is no secret"),
        pytest.param("REDIS_AUTH=abc MYSQL_PASSWD=def", "REDIS_AUTH=******** MYSQL_PASSWD=********", id="variables"),
        pytest.param("SENTRY_DSN=https://k@sentry.io/1", "SENTRY_DSN=********", id="a DSN"),
        pytest.param("GIT_AUTHOR=me", "GIT_AUTHOR=me", id="an author is no secret"),
        pytest.param("host=db user=me password=abc port=1", "host=db user=me password=******** port=1", id="libpq"),
        pytest.param("password='a b' x", "password=******** x", id="libpq with quotes"),
        pytest.param('{"api_key": "abc", "n": 1}', '{"api_key": "********", "n": 1}', id="JSON"),
        pytest.param("{'access_token': 'abc'}", "{'access_token': '********'}", id="a Python dictionary"),
        pytest.param('{"unique_key": "abc"}', '{"unique_key": "abc"}', id="an ordinary key"),
        pytest.param("Authorization: Bearer abcdef123456", "Authorization: Bearer ********", id="a header"),
    ],
)
def test_text_that_looks_like_a_secret_is_masked(text: str, shown: str) -> None:
    assert shown in mask_of([])(text)
