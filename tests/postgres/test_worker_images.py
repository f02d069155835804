"""The worker images in deploy/images: linted, complete, and their scripts run. Built by root where buildah works, and
where Docker runs."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.image_builder import ImageBuilder, has_buildah
from support.wheel_folder import write_wheels
from support.wheel_server import tiny_wheel

REPOSITORY = Path(__file__).parents[2]
IMAGES = REPOSITORY / "deploy" / "images"
DOCKERFILES = sorted(IMAGES.glob("*.Dockerfile"))
BIN = Path(sys.executable).parent
TIMEOUT_S = 60
BUILD_TIMEOUT_S = 1800
JOIN = {"worker_id": "gpu-0-aa", "url": "https://windlass.example.com", "join_token": "wlj_secret"}
# Where the CUDA image keeps downloaded weights while there is no volume that its user may write to.
CACHE = "/home/windlass/huggingface"
# Stands for the installed program: it prints its arguments and whether the token is in its environment.
PROGRAM = '#!/bin/sh\necho "$@"\nenv | grep -c WINDLASS_JOIN\ncat "$WORKER_STATE/join.json"\n'


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_worker_image_passes_hadolint(dockerfile: Path) -> None:
    linted = subprocess.run(
        [BIN / "hadolint", dockerfile], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert (linted.returncode, linted.stdout) == (0, "")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_worker_image_is_complete(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    # Only the user's own folder is not in the repository.
    sources = [word for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE) for word in line.split()[:-1]]
    own = [word for word in sources if not word.startswith(("app", "${"))]
    assert "src" in own
    assert [word for word in own if not (REPOSITORY / word).exists()] == []
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    assert not [name for name in re.findall(r"^COPY \$\{(\w+)\}", text, re.MULTILINE) if not (
        REPOSITORY / defaults[name]).is_dir()]  # fmt: skip
    user = re.findall(r"^USER (.*)$", text, re.MULTILINE)[-1]
    assert defaults.get(user.strip("${}"), user) == "10001"
    for instruction in ("HEALTHCHECK", 'ENTRYPOINT ["entrypoint.sh"]', "VOLUME /var/lib/windlass"):
        assert f"\n{instruction}" in text


def test_worker_images_are_those_that_the_docs_name() -> None:
    assert [path.name for path in DOCKERFILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]
    # The worker refuses variables that look like settings and are none.
    variables = re.findall(r"\bWINDLASS_\w+", "".join(path.read_text() for path in IMAGES.iterdir() if path.is_file()))
    assert set(variables) == {"WINDLASS_JOIN"}


def start(folder: Path, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
    (folder / "windlass").write_text(PROGRAM)
    (folder / "windlass").chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [IMAGES / "entrypoint.sh", *words],
        env={"PATH": path, "WORKER_STATE": str(folder / "state"), **env},
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


def test_entrypoint_joins_with_a_private_file_and_without_the_variable(tmp_path: Path) -> None:
    done = start(tmp_path, WINDLASS_JOIN=json.dumps(JOIN))
    file = tmp_path / "state" / "join.json"
    arguments, tokens, joined = done.stdout.splitlines()
    assert arguments == f"worker --join {file}"
    assert tokens == "0"
    assert json.loads(joined) == JOIN
    assert file.stat().st_mode & 0o777 == 0o600
    # After a restart of the container, the file that has been used is kept.
    file.write_text("{}")
    assert start(tmp_path, WINDLASS_JOIN=json.dumps(JOIN)).stdout.splitlines()[2] == "{}"


def test_entrypoint_without_join_data_takes_arguments_or_says_what_is_missing(tmp_path: Path) -> None:
    assert start(tmp_path, "--queue", "q", "--handler", "app:f").stdout.splitlines()[0] == (
        "worker --queue q --handler app:f"
    )
    refused = start(tmp_path)
    assert (refused.returncode, "WINDLASS_JOIN is not set" in refused.stderr) == (2, True)


def test_weights_are_cached_in_a_folder_that_the_images_user_owns() -> None:
    text = (IMAGES / "cuda.Dockerfile").read_text()
    assert re.findall(r"\bHF_HOME=(\S+)", text) == [CACHE]
    assert f"install -d -o windlass -g windlass {CACHE}" in text
    # The entrypoint moves this folder only, not one that a person chose.
    assert CACHE in (IMAGES / "entrypoint.sh").read_text()


@pytest.mark.parametrize(
    ("home", "volume", "cache"),
    [
        pytest.param(CACHE, "writable", "volume", id="volume"),
        pytest.param(CACHE, "prepared", "volume", id="prepared folder of a volume of root"),
        pytest.param(CACHE, "file", "image", id="volume that refuses a folder"),
        pytest.param(CACHE, "none", "image", id="no volume"),
        pytest.param("/elsewhere", "writable", "elsewhere", id="chosen"),
        pytest.param(None, "writable", None, id="CPU image"),
    ],
)
def test_entrypoint_caches_weights_on_a_volume_where_it_may_write(
    tmp_path: Path, home: str | None, volume: str, cache: str | None
) -> None:
    folder = tmp_path / "workspace"
    if volume != "none":
        folder.mkdir()
    if volume == "prepared":
        (folder / "huggingface").mkdir()
    if volume == "file":
        # Root may write to every folder: a file in its place is refused to root, too.
        (folder / "huggingface").write_text("")
    (tmp_path / "program").mkdir()
    env = {"WORKER_VOLUME": str(folder), **({"HF_HOME": home} if home is not None else {})}
    program = tmp_path / "program" / "windlass"
    program.write_text('#!/bin/sh\necho "${HF_HOME-unset}"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [IMAGES / "entrypoint.sh", "--queue", "q"], env={"PATH": path, **env},
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    places = {"volume": f"{folder}/huggingface", "image": CACHE, "elsewhere": "/elsewhere", None: "unset"}
    assert (done.stdout, done.stderr, done.returncode) == (f"{places[cache]}\n", "", 0)
    assert (folder / "huggingface").is_dir() is (cache == "volume")


def as_first_process(words: list[str], folder: Path, **env: str) -> str:
    """What a program prints as the first process of a container, which is what a health check looks at."""
    namespace = [
        "unshare",
        *(() if os.geteuid() == 0 else ("--user", "--map-root-user")),
        "--pid",
        "--fork",
        "--mount-proc",
    ]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this host admits no PID namespace (unshare --pid)")
    path = f"{folder}{os.pathsep}{IMAGES}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*namespace, *words], env={"PATH": path, "WORKER_STATE": str(folder / "state"), **env},
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    return done.stdout


@pytest.mark.parametrize(
    ("words", "env", "gpu", "is_healthy"),
    [
        (["entrypoint.sh", "--queue", "q"], {}, None, True),
        (["sh", "-c", "healthcheck.sh; echo $?"], {}, None, False),
        (["entrypoint.sh", "--queue", "q"], {"WORKER_NEEDS_GPU": "1"}, "echo GPU 0", True),
        (["entrypoint.sh", "--queue", "q"], {"WORKER_NEEDS_GPU": "1"}, "exit 9", False),
    ],
    ids=["worker runs", "another program runs", "driver answers", "driver fails"],
)
def test_health_check_sees_the_worker_and_the_driver(
    tmp_path: Path, words: list[str], env: dict[str, str], gpu: str | None, is_healthy: bool
) -> None:
    """The stand-in for the worker's program runs the health check, as Docker does next to it."""
    programs = {"windlass": "healthcheck.sh; echo $?", "nvidia-smi": gpu or "exit 127"}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    status = as_first_process(words, tmp_path, **env).splitlines()[-1]
    assert (status == "0") is is_healthy


def test_shellcheck_accepts_scripts_of_the_images() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck here: install the package shellcheck")
    judged = subprocess.run(
        ["shellcheck", *IMAGES.glob("*.sh")], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert (judged.returncode, judged.stdout) == (0, "")


def has_docker() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, timeout=TIMEOUT_S, check=False).returncode == 0


def build_context(context: Path, requirements: str | None = None) -> Path:
    context.mkdir()
    for name in ("src", "deploy"):
        shutil.copytree(REPOSITORY / name, context / name, ignore=shutil.ignore_patterns("__pycache__"))
    (context / "docs").mkdir()
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", "docs/runbooks.md"):
        shutil.copy(REPOSITORY / name, context / name)
    (context / "app").mkdir()
    (context / "app" / "app.py").write_text("def generate(task):\n    return task.payload\n")
    if requirements is not None:
        (context / "app" / "requirements.txt").write_text(requirements)
    return context


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_wheels(tmp_path_factory.mktemp("wheels"), also=("hatchling",))
    (folder / "app_needs-1.0-py3-none-any.whl").write_bytes(tiny_wheel("app_needs", "1.0"))
    return folder


NO_BUILDAH = pytest.mark.skipif(
    not has_buildah(), reason="no buildah here: on Debian, tools/system-packages.sh installs it (as root)"
)


@pytest.fixture
def builder(tmp_path: Path, wheels: Path) -> Iterator[ImageBuilder]:
    folder = tmp_path / "images"
    folder.mkdir()
    builder = ImageBuilder(folder, wheels)
    if (problem := builder.problem()) is not None:
        pytest.skip(f"buildah runs no container here: {problem}")
    yield builder
    # pytest keeps the folders of the last runs, and an image has 400 MB.
    shutil.rmtree(folder)


@pytest.mark.timeout(2 * BUILD_TIMEOUT_S)
@pytest.mark.needs_root
@NO_BUILDAH
@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_image_is_built_on_a_base_without_registry_and_runs_as_an_ordinary_user(
    dockerfile: Path, tmp_path: Path, builder: ImageBuilder
) -> None:
    make_bases(builder, dockerfile)
    # Requirements are optional.
    has_requirements = dockerfile.name == "cpu.Dockerfile"
    context = build_context(tmp_path / "sources", "app-needs==1.0\n" if has_requirements else None)
    config = builder.build(dockerfile, context, "worker")
    assert (config["User"], config["WorkingDir"], config["Entrypoint"]) == ("10001", "/app", ["entrypoint.sh"])
    assert config["Healthcheck"]["Test"] == ["CMD", "healthcheck.sh"]
    worker = builder.container("worker")
    refused = builder.run(worker, config["Entrypoint"])
    assert (refused.returncode, "WINDLASS_JOIN is not set" in refused.stderr) == (2, True), refused.stderr
    seen = "import app, importlib.util as i, os; print(os.getuid(), os.access('/var/lib/windlass', os.W_OK)"
    ran = builder.run(worker, ["python", "-c", f"{seen}, i.find_spec('app_needs') is not None)"])
    assert ran.stdout == f"10001 True {has_requirements}\n", ran.stderr
    # What a handler downloads without a volume, as `from_pretrained` does.
    download = "import os, pathlib as p; (p.Path(os.environ['HF_HOME']) / 'hub').mkdir(); print(os.environ['HF_HOME'])"
    if "cuda" in dockerfile.name:
        assert builder.run(worker, ["python", "-c", download]).stdout == f"{CACHE}\n"
    assert builder.run(worker, ["windlass", "--version"]).stdout.startswith("windlass ")


def make_bases(builder: ImageBuilder, dockerfile: Path) -> None:
    text = dockerfile.read_text()
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    for base in dict.fromkeys(re.findall(r"^FROM (\S+)", text, re.MULTILINE)):
        builder.make_base(re.sub(r"\$\{(\w+)\}", lambda found: defaults[found[1]], base))


@pytest.mark.timeout(2 * BUILD_TIMEOUT_S)
@pytest.mark.needs_root
@NO_BUILDAH
def test_control_plane_image_is_built_on_a_base_without_registry(tmp_path: Path, builder: ImageBuilder) -> None:
    dockerfile = REPOSITORY / "deploy" / "docker" / "Dockerfile"
    make_bases(builder, dockerfile)
    config = builder.build(dockerfile, build_context(tmp_path / "sources"), "control")
    assert (config["User"], config["Entrypoint"], config["Cmd"][0]) == ("10001", ["windlass"], "up")
    ran = builder.run(builder.container("control"), [*config["Entrypoint"], "doctor"])
    assert "embedded" in ran.stdout, ran.stderr


# Its base image has several GB.
CUDA_BUILD = pytest.mark.skipif(
    "WINDLASS_BUILD_CUDA" not in os.environ, reason="set WINDLASS_BUILD_CUDA=1 to build the CUDA image too"
)


@pytest.mark.timeout(2 * BUILD_TIMEOUT_S)
@pytest.mark.skipif(not has_docker(), reason="no Docker daemon here: images are built where one runs")
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=CUDA_BUILD)])
def test_image_is_built_and_refuses_to_start_without_join_data(kind: str, tmp_path: Path) -> None:
    context = build_context(tmp_path / "context")
    tag = f"windlass-test-worker-{kind}"
    subprocess.run(
        ["docker", "build", "-f", context / f"deploy/images/{kind}.Dockerfile", "-t", tag, context],
        timeout=BUILD_TIMEOUT_S, check=True,
    )  # fmt: skip
    done = subprocess.run(["docker", "run", "--rm", tag], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "WINDLASS_JOIN is not set" in done.stderr) == (2, True)
