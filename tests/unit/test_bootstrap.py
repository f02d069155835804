"""The user data of a machine: its content, secrets, invalid settings, hostile values, custom templates."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from windlass.model.bootstrap import MAX_USER_DATA_BYTES, BootstrapSettings
from windlass.model.errors import BadInput, ConfigError, WindlassError
from windlass.model.machine import MachineRequest
from windlass.worker.bootstrap import quoted, render_user_data

TOKEN = "wjt_3f1c9a"
URL = "https://control.example.org:8443"
EVERYTHING = BootstrapSettings(
    has_docker=True,
    # The original Hetzner autoscaler's list.
    images=("python:3.11-slim", "python:3.10-slim", "rgrid/python:3.11-datascience", "rgrid/ffmpeg:latest"),
    packages=("git", "build-essential"),
    requirements=("--extra-index-url https://pypi.example.org/simple", "ray[default]==2.49.0", "app==1.2"),
    setup=("git clone https://example.org/app /srv/app", "docker inspect --format '{{.Id}}' app\necho {% done"),
    ray_address="10.0.0.2:6379",
    ray_num_cpus=2,
)


def request(name: str = "renders-3-00c0ffee00", token: str | None = TOKEN) -> MachineRequest:
    return MachineRequest(name, "renders", 3, token)


def rendered(settings: BootstrapSettings = EVERYTHING, **given: Any) -> dict[str, Any]:
    document = render_user_data(settings, request(), URL, **given)
    content: dict[str, Any] = yaml.safe_load(document)
    return content


def written(content: dict[str, Any]) -> dict[str, str]:
    return {file["path"]: file["content"] for file in content["write_files"]}


def unit(content: dict[str, Any], name: str = "windlass-worker") -> list[str]:
    return written(content)[f"/etc/systemd/system/{name}.service"].splitlines()


# ------------------------------------------------------------------------------------------------------------- content


def test_document_begins_with_cloud_config_header() -> None:
    assert render_user_data(BootstrapSettings(), request(), URL).startswith("#cloud-config\n")


def test_join_file_has_id_url_and_token_and_mode_0600() -> None:
    content = rendered(BootstrapSettings())
    (file,) = [file for file in content["write_files"] if file["path"] == "/etc/windlass/join.json"]
    assert json.loads(file["content"]) == {"worker_id": "renders-3-00c0ffee00", "url": URL, "join_token": TOKEN}
    assert file["permissions"] == "0600"
    assert "encoding" not in file


def test_join_token_is_only_in_join_file() -> None:
    assert render_user_data(EVERYTHING, request(), URL).count(TOKEN) == 1


def test_default_document_has_only_required_files() -> None:
    content = rendered(BootstrapSettings())
    assert set(content) == {"ssh_pwauth", "package_update", "packages", "write_files", "runcmd"}
    assert content["ssh_pwauth"] is False
    assert content["packages"] == ["ca-certificates", "python3-venv"]
    assert set(written(content)) == {
        "/etc/windlass/join.json",
        "/usr/local/lib/windlass/boot.sh",
        "/usr/local/lib/windlass/fetch_wheel.py",
        "/etc/systemd/system/windlass-worker.service",
    }
    assert content["runcmd"] == [["sh", "/usr/local/lib/windlass/boot.sh", "windlass"]]


def test_fleet_settings_arrive_unchanged() -> None:
    content = rendered()
    files = written(content)
    assert content["packages"][2:] == ["docker.io", "git", "build-essential"]
    assert files["/usr/local/lib/windlass/images"].split() == list(EVERYTHING.images)
    assert files["/usr/local/lib/windlass/requirements.txt"].splitlines() == list(EVERYTHING.requirements)
    assert files["/usr/local/lib/windlass/setup/001.sh"] == EVERYTHING.setup[0] + "\n"
    assert files["/usr/local/lib/windlass/setup/002.sh"] == EVERYTHING.setup[1] + "\n"


def test_worker_unit_is_unprivileged_and_respects_exit_code_3() -> None:
    lines = unit(rendered(BootstrapSettings(), stop_timeout_s=89.5))
    assert "ExecStart=/opt/windlass/bin/windlass worker --join /etc/windlass/join.json" in lines
    assert "User=windlass" in lines
    assert "CapabilityBoundingSet=" in lines
    assert "WorkingDirectory=/var/lib/windlass" in lines
    assert "RestartPreventExitStatus=3" in lines
    assert "PrivateTmp=yes" in lines
    # The drain time plus STOP_MARGIN_S.
    assert "TimeoutStopSec=120" in lines
    assert not [line for line in lines if "docker" in line or "ray" in line]


def test_worker_with_docker_shares_tmp() -> None:
    lines = unit(rendered(BootstrapSettings(has_docker=True)))
    assert {"PrivateTmp=no", "SupplementaryGroups=docker", "After=docker.service"} <= set(lines)


def test_ray_unit_exists_only_with_ray_address() -> None:
    assert "/etc/systemd/system/windlass-ray.service" not in written(rendered(BootstrapSettings()))
    (start,) = [line for line in unit(rendered(), "windlass-ray") if line.startswith("ExecStart=")]
    assert start == (
        "ExecStart=/opt/windlass/bin/ray start --block --address=10.0.0.2:6379 --num-cpus=2"
        " --labels=windlass-worker=renders-3-00c0ffee00"
    )


PEM = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"


def test_ca_certificate_is_written_and_named_in_join_file(tmp_path: Path) -> None:
    (tmp_path / "authority.pem").write_text(PEM)
    files = written(rendered(BootstrapSettings(ca_file=tmp_path / "authority.pem")))
    assert files["/etc/windlass/ca.pem"] == PEM
    assert json.loads(files["/etc/windlass/join.json"])["ca_file"] == "ca.pem"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(None, id="no file"),
        pytest.param(b"", id="empty file"),
        pytest.param(b"\x30\x82\xff", id="no PEM"),
        pytest.param(300 * PEM.encode(), id="all authorities of the system"),
        pytest.param(f"{PEM}-----BEGIN RSA PRIVATE KEY-----\nhunter2\n".encode(), id="with private key"),
    ],
)
def test_invalid_ca_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "authority.pem").write_bytes(content)
    with pytest.raises(ConfigError, match=r"authority.pem.*bootstrap.ca_file") as caught:
        rendered(BootstrapSettings(ca_file=tmp_path / "authority.pem"))
    assert "hunter2" not in str(caught.value)


def test_full_document_leaves_room_for_setup_commands() -> None:
    assert len(render_user_data(EVERYTHING, request(), URL)) < MAX_USER_DATA_BYTES * 0.62


# ------------------------------------------------------------------------------------------------------- invalid input


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param({"images": ["a"]}, "images requires has_docker", id="images without Docker"),
        pytest.param({"ray_num_cpus": 2}, "ray_num_cpus requires ray_address", id="CPUs without Ray"),
        pytest.param({"ray_address": "h:1"}, "ray_address requires Ray", id="Ray not installed"),
        pytest.param(
            {"ray_address": "h:1", "requirements": ["ray-tools"]}, "requires Ray", id="package with similar name"
        ),
        pytest.param({"ray_address": "h", "requirements": ["ray"]}, "pattern", id="head without port"),
        pytest.param({"ray_address": "h:1 --head", "requirements": ["ray"]}, "pattern", id="option after the head"),
        pytest.param({"ray_address": "h:1\n", "requirements": ["ray"]}, "pattern", id="line break after the head"),
        pytest.param({"has_docker": True, "images": ["--all"]}, "not a valid Docker image name", id="option as image"),
        pytest.param({"has_docker": True, "images": ["a b"]}, "not a valid Docker image name", id="two images in one"),
        pytest.param({"packages": ["-y"]}, "not a valid Ubuntu package name", id="option as package"),
        pytest.param({"packages": ["git\ncurl"]}, "not a valid Ubuntu package name", id="two packages in one"),
        pytest.param({"requirements": ["a\nb"]}, "one line", id="two requirements in one"),
        pytest.param({"requirements": [" "]}, "one line", id="empty requirement"),
        pytest.param({"setup": [""]}, "command is empty", id="empty command"),
        pytest.param({"setup": ["a\0"]}, "control characters", id="zero byte in command"),
        pytest.param({"user": "Robert'); drop"}, "pattern", id="invalid user name"),
        pytest.param({"docker": True}, "Extra inputs", id="unknown key"),
    ],
)
def test_invalid_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        BootstrapSettings.model_validate(given)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "control.example.org",
        "ftp://control.example.org",
        "https://",
        "https://user:hunter2@control.example.org",
        "https://control.example.org/?key=hunter2",
        "https://control.example.org/#hunter2",
        "https://control.example.org:99999",
        "https://control.example.org:port",
        "https://control example.org",
        "https://control.example.org/\nhunter2",
        "https://kontrollstraße.example.org",
        'https://control.example.org/"',
    ],
)
def test_invalid_url_is_refused_and_not_quoted(url: str) -> None:
    with pytest.raises(BadInput) as caught:
        render_user_data(BootstrapSettings(), request(), url)
    assert "https://host:port" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://10.0.0.2:8080", "https://[fd00::2]:8443/", "https://example.org/windlass"])
def test_trailing_slash_of_url_is_removed(url: str) -> None:
    content = yaml.safe_load(render_user_data(BootstrapSettings(), request(), url))
    assert json.loads(written(content)["/etc/windlass/join.json"])["url"] == url.rstrip("/")


@pytest.mark.parametrize("token", [None, "", "a b", "a\nb"])
def test_request_without_valid_join_token_is_refused(token: str | None) -> None:
    with pytest.raises(BadInput, match="has no join token"):
        render_user_data(BootstrapSettings(), request(token=token), URL)


@pytest.mark.parametrize("name", ["fleet:a-0-00", "x" * 70, "a-0-"])
def test_worker_id_that_is_no_ray_label_is_refused(name: str) -> None:
    render_user_data(BootstrapSettings(), request(name), URL)
    with pytest.raises(BadInput, match="label of a Ray node"):
        render_user_data(EVERYTHING, request(name), URL)


def test_document_over_size_limit_is_refused() -> None:
    settings = BootstrapSettings(setup=("true # " + "x" * MAX_USER_DATA_BYTES,))
    with pytest.raises(ConfigError, match=r"bytes of user data, more than the limit of 32,768: move setup commands"):
        render_user_data(settings, request(), URL)


# ------------------------------------------------------------------------------------------------------ hostile values


@given(st.text())
@example("{{ join_json }}")
@example("{{{%{{")
@example("\\{{ \\\\{%")
@example("'\"\n---\n...\n#: - &*!|>%@`")
@example("\x00\x7f\x85\u2028\ufeff\U0001f600")
def test_quoted_text_survives_yaml_round_trip(text: str) -> None:
    found = quoted(text)
    assert yaml.safe_load(f"- {found}\n") == [text]
    assert found.isascii()
    assert "\n" not in found
    assert "{{" not in found
    assert "{%" not in found


@given(st.lists(st.text(), max_size=3), st.lists(st.text(), max_size=3))
def test_hostile_settings_arrive_unchanged_or_are_refused(setup: list[str], requirements: list[str]) -> None:
    try:
        settings = BootstrapSettings(setup=tuple(setup), requirements=tuple(requirements))
    except ValidationError:
        return
    files = written(rendered(settings))
    assert [files[path] for path in files if "/setup/" in path] == [f"{command}\n" for command in setup]
    lines = files.get("/usr/local/lib/windlass/requirements.txt", "").split("\n")
    assert lines[:-1] == requirements


NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.:{%-]{0,40}", fullmatch=True)
URLS = st.from_regex(r"https?://[a-z0-9.-]{1,12}(:[0-9]{1,5})?(/[a-z{%'\"~.-]{0,4}){0,2}", fullmatch=True)
TOKENS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1)


@given(NAMES | st.text(), URLS | st.text().map("https://".__add__) | st.text(), TOKENS | st.text())
def test_hostile_requests_arrive_unchanged_or_are_refused(name: str, url: str, token: str) -> None:
    try:
        document = render_user_data(EVERYTHING, MachineRequest(name, "renders", 0, token), url)
    except BadInput:
        return
    assert json.loads(written(yaml.safe_load(document))["/etc/windlass/join.json"]) == {
        "worker_id": name,
        "url": url.rstrip("/"),
        "join_token": token,
    }


# ---------------------------------------------------------------------------------------------------- custom templates


def with_template(tmp_path: Path, text: str) -> str:
    file = tmp_path / "mine.j2"
    file.write_text(text)
    return render_user_data(BootstrapSettings(template=file), request(), URL)


def test_custom_template_may_extend_default(tmp_path: Path) -> None:
    document = with_template(
        tmp_path,
        """{% extends "windlass" %}
{% block files %}
  - path: /etc/motd
    content: {{ fleet | yaml }}
{% endblock %}
{% block more %}
ca_certs:
  trusted: [{{ "-----BEGIN" | yaml }}]
{% endblock %}
""",
    )
    content = yaml.safe_load(document)
    assert document.startswith("#cloud-config\n")
    assert written(content)["/etc/motd"] == "renders"
    assert content["ca_certs"] == {"trusted": ["-----BEGIN"]}
    assert content["runcmd"] == [["sh", "/usr/local/lib/windlass/boot.sh", "windlass"]]


JOIN = 'write_files:\n  - {path: /etc/windlass/join.json, permissions: "0600", content: {{ join_json | yaml }}}\n'


def test_custom_template_may_stand_alone(tmp_path: Path) -> None:
    assert TOKEN in with_template(tmp_path, "#cloud-config\n" + JOIN)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            "# mine\n#cloud-config\n" + JOIN, "does not begin with the line #cloud-config", id="header not first"
        ),
        pytest.param(
            "#cloud-config\n{{ databse }}", "cannot be rendered ('databse' is undefined)", id="undefined variable"
        ),
        pytest.param(
            "#cloud-config\n{{ x | yaml }}", "cannot be rendered ('x' is undefined)", id="undefined variable, quoted"
        ),
        pytest.param("#cloud-config\n{% if %}", "has a syntax error in line 2: ", id="syntax error"),
        pytest.param('#cloud-config\n{% extends "ours" %}', "cannot be rendered (", id="extends unknown template"),
        pytest.param("#cloud-config\n{{ slot / 0 }}", "cannot be rendered (", id="arithmetic error"),
        pytest.param("#cloud-config\n{{ settings | yaml }}", "cannot be rendered (", id="value that cannot be quoted"),
        pytest.param(
            "#cloud-config\n" + JOIN + "\nx: '{% raw %}{{ WORKER }}{% endraw %}'\n",
            "leaves a placeholder in line 5",
            id="placeholder left",
        ),
        pytest.param("#cloud-config\nx: [{{ join_json }}\n", "does not render YAML (line", id="not YAML"),
        pytest.param("#cloud-config\nx: 1\n", "does not write /etc/windlass/join.json", id="no join file"),
        pytest.param("#cloud-config\n- 1\n", "does not write /etc/windlass/join.json", id="list"),
        pytest.param(
            "#cloud-config\n" + JOIN.replace("0600", "0644"),
            "does not write /etc/windlass/join.json",
            id="readable join file",
        ),
        pytest.param(
            "#cloud-config\n" + JOIN.replace("join_json", "('{}' ~ join_json)"),
            "does not write /etc/windlass/join.json",
            id="damaged join file",
        ),
        pytest.param(
            "#cloud-config\n" + JOIN + f"x: {'y' * MAX_USER_DATA_BYTES}\n",
            "more than the limit of 32,768",
            id="too long",
        ),
    ],
)
def test_unusable_template_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_template(tmp_path, text)
    assert message in str(caught.value)
    assert "mine.j2" in str(caught.value)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("name", ["missing.j2", ".", "binary.j2"])
def test_unreadable_template_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "binary.j2").write_bytes(b"#cloud-config\n\xff")
    with pytest.raises(
        WindlassError, match=r"cannot read the bootstrap template|the bootstrap template .* cannot be rendered"
    ):
        render_user_data(BootstrapSettings(template=tmp_path / name), request(), URL)
