"""Settings of adopted tables: defaults, rules, and the sentences that explain an error."""

from pathlib import Path

import pytest

from windlass.config_loader import load_config
from windlass.model.adoption import split_table
from windlass.model.errors import ConfigError
from windlass.store.adoption_script import apply_script, identifier, literal


def load(folder: Path, toml: str) -> object:
    file = folder / "windlass.toml"
    file.write_text(toml)
    return load_config(file)


def test_defaults_fit_the_table_of_the_first_orchestrators(tmp_path: Path) -> None:
    file = tmp_path / "windlass.toml"
    file.write_text("[adopt.tasks]\n")
    table = load_config(file).config.adopt["tasks"]
    assert (table.place("tasks"), table.key) == (("public", "tasks"), "id")
    assert table.columns.written() == {
        "status": "status",
        "attempts": "attempts",
        "worker": "worker_id",
        "started_at": "generation_started_at",
        "finished_at": "generation_processed_at",
    }
    assert table.states.by_state() == {
        "queued": "Queued",
        "running": "In Progress",
        "retrying": "Queued",
        "complete": "Complete",
        "failed": "Failed",
        "cancelled": "Failed",
    }


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[adopt.tasks]\ncolumn = 'id'", "adopt.tasks.column in"),
        ("[adopt.tasks]\nkey = ''", "is '': '' is not a name of PostgreSQL"),
        ("[adopt.tasks]\ntable = 'a.b.c'", "'a.b.c' is not a table: write name or schema.name"),
        ("[adopt.tasks]\nqueue = 'a b'", "invalid queue name 'a b'"),
        ("[adopt.'a b']", "invalid name of an adopted table 'a b': use at most 30 letters"),
        (f"[adopt.{'x' * 31}]", "use at most 30 letters"),
        ("[adopt.tasks.states]\nfailed = 'Queued'", "failed has the status of queued, 'Queued'"),
        ("[adopt.tasks.states]\nrunning = 'Complete'", "running has the status of a finished task"),
        ("[adopt.tasks.states]\nretrying = 'Failed'", "retrying has the status of a finished task"),
        ("[adopt.tasks.states]\nfailed = 'Complete'", "complete has the status of a failed or cancelled task"),
        ("[adopt.tasks.columns]\nworker = 'w'\nerror = 'w'", "column 'w' is named twice"),
        ("[adopt.tasks.columns]\nerror = 'p'\npriority = 'p'", "column 'p' is both read and written"),
        ("[adopt.tasks]\nresult_path = ['url']", "result_path is set and columns.result is not"),
        ("[adopt.tasks]\npayload = ['a']\npayload_sql = 'r.a'", "payload and payload_sql are both set"),
        ("[adopt.tasks]\nkey = 'status'", "the column 'status' is the key and a column that Windlass writes"),
        ("[adopt.tasks]\nmax_attempts = 0", "adopt.tasks.max_attempts (from"),
        ("adopt = 3", "is 3: [adopt.NAME] must be a table"),
    ],
)
def test_error_names_the_setting_and_the_reason(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, toml)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("tasks", ("public", "tasks")),
        ("app.Tasks", ("app", "Tasks")),
        ('"my.app"."ta""sks"', ("my.app", 'ta"sks')),
        ('app."x y"', ("app", "x y")),
    ],
)
def test_names_of_tables_are_literal(text: str, place: tuple[str, str]) -> None:
    assert split_table(text) == place


def test_every_value_is_quoted() -> None:
    assert identifier('a"b') == '"a""b"'
    assert (literal("it's"), literal("a\\'b")) == ("'it''s'", "E'a\\\\''b'")


def test_configuration_that_is_not_changed_gives_the_same_script(tmp_path: Path) -> None:
    file = tmp_path / "windlass.toml"
    file.write_text("[adopt.tasks]\n")
    first, second = (load_config(file).config.adopt["tasks"] for _ in range(2))
    assert apply_script("tasks", first) == apply_script("tasks", second)
    assert "@" not in apply_script("tasks", first)
