"""Where settings come from, and what is said of those that cannot be used."""

from pathlib import Path

import pytest

from windlass.configure import ENVIRONMENT_ALIASES, load_config
from windlass.model.address import masked, problem_of_database_url
from windlass.model.errors import ConfigError

PASSWORD = "hunter2"


@pytest.fixture(autouse=True)
def nothing_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in os.environ:
        if name.startswith("WINDLASS_") or name in ENVIRONMENT_ALIASES:
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_without_anything_set_every_value_is_its_default() -> None:
    assert {setting.source for setting in load_config().settings()} == {"default"}
    assert load_config().config.database_url is None


def test_the_command_line_is_stronger_than_the_environment_and_that_than_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_the_name_that_says_windlass_is_stronger_than_database_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://everybody/db")
    monkeypatch.setenv("WINDLASS_DATABASE_URL", "postgresql://ours/db")
    loaded = load_config()
    assert loaded.config.database_url is not None
    assert loaded.config.database_url.get_secret_value() == "postgresql://ours/db"
    assert loaded.sources["database_url",] == "WINDLASS_DATABASE_URL"


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "")
    monkeypatch.setenv("WINDLASS_WORKER__LEASE_S", "")
    assert load_config().settings() == [s for s in load_config().settings() if s.source == "default"]


def test_a_data_directory_on_the_command_line_is_stronger_than_database_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://server/db")
    assert load_config(overrides={"data_dir": Path("here")}).config.database_url is None


def test_a_relative_data_directory_in_a_file_is_meant_from_where_that_file_is(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "elsewhere" / "w.toml"
    file.write_text('data_dir = "data"')
    assert load_config(file).config.data_dir == tmp_path / "elsewhere" / "data"
    assert load_config(file, {"data_dir": Path("data")}).config.data_dir == tmp_path / "data"


def test_a_line_end_after_the_address_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
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
        pytest.param("WINDLASS_TASK_ID", id="what a worker tells the commands it runs"),
        pytest.param("WINDLASS_DEBUG", id="the switch for tracebacks"),
    ],
)
def test_names_that_others_put_there_do_no_harm(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "tcp://10.0.0.1:5432")
    load_config()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        pytest.param("lease = 3", "lease in windlass.toml is not a setting", id="an unknown name"),
        pytest.param("[worker]\nlease = 3", "did you mean worker.lease_s?", id="a name with a typo"),
        pytest.param("[woker]\nlease_s = 3", "woker in windlass.toml is not a setting", id="an unknown section"),
        pytest.param("worker = 3", "worker (from windlass.toml)", id="a value where a section belongs"),
        pytest.param("max_payload_bytes = -1", "is -1: input should be greater than 0", id="a number out of range"),
        pytest.param("max_payload_bytes = 'much'", "is 'much': input should be a valid integer", id="a word"),
        pytest.param("[worker]\nlease_s = 3", "at least three beats must fit into a lease", id="values at odds"),
        pytest.param("a = = 1", "is not valid TOML (Invalid value (at line 1", id="no TOML"),
        pytest.param(b"a = '\xff'", "is not valid TOML (byte 5 is not UTF-8)", id="no text"),
        pytest.param(f"database_url = ['{PASSWORD}']", "database_url (from windlass.toml): input", id="a list"),
        pytest.param(f"database_url = '{PASSWORD}'", "(from windlass.toml) is not an address", id="no address"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with(tmp_path: Path, content: str | bytes, sentence: str) -> None:
    (tmp_path / "windlass.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        load_config()
    assert sentence in str(caught.value)
    assert PASSWORD not in str(caught.value)


def test_a_file_that_is_named_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no configuration file"):
        load_config(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        pytest.param("WINDLASS_WORKER__LEASE", "3", "did you mean WINDLASS_WORKER__LEASE_S?", id="an unknown name"),
        pytest.param("WINDLASS_WORKER__LEASE_S", "long", "(from WINDLASS_WORKER__LEASE_S) is 'long'", id="a bad value"),
        pytest.param("WINDLASS_WORKER", "{", "WINDLASS_WORKER in the environment is not a setting", id="a section"),
        pytest.param("DATABASE_URL", f"mysql://u:{PASSWORD}@h/d", "is not the address of a Post", id="another kind"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused_with(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, sentence: str
) -> None:
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
        pytest.param("host=h dbname=d", "is not an address", id="keywords"),
        pytest.param("", "is not an address", id="nothing"),
        pytest.param("postgresql://u:p#w@h/db", "%23", id="an unencoded #"),
        pytest.param("postgresql://u:p/w@h/db", "%2F", id="an unencoded /"),
        pytest.param("postgresql://u:p?w@h/db", "%3F", id="an unencoded ?"),
        pytest.param("postgresql://u:p@h:http/db", "port", id="a port in letters"),
        pytest.param("postgresql://u:p@h:99999/db", "port", id="a port too high"),
        pytest.param("postgresql://u:p@[::1/db", "brackets", id="half of an IPv6 address"),
    ],
)
def test_an_address_is_judged(url: str, problem: str | None) -> None:
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
def test_no_password_in_an_address_is_shown(text: str) -> None:
    assert PASSWORD not in masked(text)
    assert "********" in masked(text)


def test_an_address_without_its_password_is_shown_and_the_rest_of_a_secret_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATABASE_URL", f"postgresql://u:{PASSWORD}@h:5432/db")
    (shown,) = [s.shown() for s in load_config().settings() if s.key == "database_url"]
    assert shown == "postgresql://u:********@h:5432/db"
