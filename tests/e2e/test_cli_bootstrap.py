"""`windlass bootstrap render`: the cloud-init document of a machine."""

import json
from pathlib import Path

import pytest
import yaml

from support.command_line import CommandLine
from windlass.cli.bootstrap import PLACEHOLDER_TOKEN, PLACEHOLDER_URL
from windlass.model.config import Config

SECRET = "hunter2"


@pytest.fixture
def windlass(tmp_path: Path) -> CommandLine:
    return CommandLine(tmp_path)


def test_document_has_a_placeholder_for_the_token(windlass: CommandLine) -> None:
    (windlass.folder / "windlass.toml").write_text('[fleets.renders.bootstrap]\npackages = ["git"]\n')
    done = windlass("bootstrap", "render", "--worker-id", "renders-7-00c0ffee00", "--url", "https://c.example.org")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("#cloud-config\n")
    content = yaml.safe_load(done.out)
    assert "git" in content["packages"]
    assert json.loads(content["write_files"][0]["content"]) == {
        "worker_id": "renders-7-00c0ffee00",
        "url": "https://c.example.org",
        "join_token": PLACEHOLDER_TOKEN,
    }
    assert "PLACEHOLDER" in PLACEHOLDER_TOKEN


def test_document_without_configuration_has_defaults(windlass: CommandLine) -> None:
    done = windlass("bootstrap", "render")
    assert (done.code, done.err) == (0, "")
    assert PLACEHOLDER_TOKEN in done.out
    assert url_in(done.out) == PLACEHOLDER_URL


@pytest.mark.parametrize(
    ("content", "url"),
    [
        ('[api]\nurl = "https://c.example.org:8443"', "https://c.example.org:8443"),
        ('control_plane_ip = "10.0.0.2"\n[api]\nhost = "0.0.0.0"\nport = 8080', "http://10.0.0.2:8080"),
    ],
)
def test_document_has_the_url_of_the_control_plane(windlass: CommandLine, content: str, url: str) -> None:
    (windlass.folder / "windlass.toml").write_text(content)
    assert url_in(windlass("bootstrap", "render").out) == url
    assert (
        url_in(windlass("bootstrap", "render", "--url", "https://other.example.org").out) == "https://other.example.org"
    )


def url_in(document: str) -> str:
    return str(json.loads(yaml.safe_load(document)["write_files"][0]["content"])["url"])


def test_document_contains_no_secret(windlass: CommandLine) -> None:
    secrets = [name for name, field in Config.model_fields.items() if "SecretStr" in str(field.annotation)]
    assert {"database_url", "hetzner_api_token"} <= set(secrets)
    lines = [f'{name} = "{SECRET}-{name}"' for name in secrets if name != "database_url"]
    lines += [f'database_url = "postgresql://user:{SECRET}@db.example.org/app"']
    lines += ["[fleets.renders]", 'exec = "./run.sh"', "[fleets.renders.env]", f'API_KEY = "{SECRET}-env"']
    lines += ["[fleets.renders.bootstrap]", "has_docker = true", 'images = ["python:3.11-slim"]']
    (windlass.folder / "windlass.toml").write_text("\n".join(lines))
    done = windlass.with_env(SOME_TOKEN=SECRET)("bootstrap", "render")
    assert (done.code, done.err) == (0, "")
    assert "python:3.11-slim" in done.out
    for word in (SECRET, "db.example.org", "API_KEY", "run.sh"):
        assert word not in done.out


@pytest.mark.parametrize(
    ("content", "args", "sentence"),
    [
        pytest.param(
            "[fleets.a]\n[fleets.b]", [], "several fleets are configured (a, b): choose one", id="several fleets"
        ),
        pytest.param("[fleets.a]", ["--fleet", "b"], "fleet b not found; configured fleets: a.", id="no such fleet"),
        pytest.param("", ["--worker-id", "a b"], "'a b' is not a valid worker id", id="an invalid worker id"),
        pytest.param("", ["--url", "example.org"], "https://host:port", id="an invalid URL"),
        pytest.param(
            '[fleets.a.bootstrap]\ntemplate = "missing.j2"',
            [],
            "cannot read the bootstrap template missing.j2: No such file or directory. Check bootstrap.template.",
            id="no template",
        ),
        pytest.param(
            '[fleets.a.bootstrap]\nimages = ["x"]',
            [],
            "fleets.a.bootstrap (has_docker from default, images from windlass.toml): images requires has_docker",
            id="images without Docker",
        ),
        pytest.param(
            "[fleets.a.bootstrap]\nhas_doker = true", [], "did you mean fleets.a.bootstrap.has_docker?", id="a typo"
        ),
        pytest.param(
            '[fleets.a.bootstrap]\nsetup = ["true", ""]',
            [],
            "fleets.a.bootstrap.setup.1 (from windlass.toml) is '': the command is empty: remove it.",
            id="an empty command",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(windlass: CommandLine, content: str, args: list[str], sentence: str) -> None:
    (windlass.folder / "windlass.toml").write_text(content)
    done = windlass("bootstrap", "render", *args)
    assert (done.code, done.out) == (2, "")
    assert sentence in done.err
    assert done.err.count("\n") == 1


def test_section_settings_can_be_environment_variables(windlass: CommandLine) -> None:
    done = windlass.with_env(WINDLASS_FLEETS__RENDERS__BOOTSTRAP__HAS_DOCKER="true")("bootstrap", "render")
    assert done.code == 0
    assert "docker.io" in yaml.safe_load(done.out)["packages"]
