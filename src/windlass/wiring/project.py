"""The files of a new project: windlass.toml, a handler and, if wanted, the files that deploy it.

Rendering is pure except for reading templates. The deploy files are those of deploy/ in the repository, which the wheel
contains; only names and values that belong to the project are replaced. `check_project` loads the configuration with
the real loader before anything is written. `write_project` replaces no file unless `may_replace` is set.
"""

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from windlass.config_loader import load_config
from windlass.control.orchestrator import shutdown_limit_s
from windlass.model.config import Config
from windlass.model.errors import BadInput, ConfigError
from windlass.model.fleet import FleetConfig
from windlass.store.embedded import STOP_TIMEOUT_S as DATABASE_STOP_S
from windlass.wiring.providers import check_worker_start
from windlass.wiring.supervisor import SERVER_STOP_S

CONFIG_FILE = "windlass.toml"
HANDLER_FILE = "app.py"
OWN_HANDLER = "app:handle"
PROVIDERS = ("local", "hetzner", "runpod")
DEPLOYMENTS = ("systemd", "docker", "kubernetes")
IMAGES = {"hetzner": "ubuntu-24.04", "runpod": "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404"}
BUDGETS = {"hetzner": "5.00", "runpod": "20.00"}
CURRENCIES = {"hetzner": "EUR", "runpod": "USD"}
KEYS = {"hetzner": "HETZNER_API_TOKEN", "runpod": "RUNPOD_API_KEY"}
_BUILT_IN_HANDLER = "windlass.worker.rehearsal:answer"


def supervisor_stop_s(fleet: FleetConfig) -> int:
    """What a service manager must grant after SIGTERM: for the machines, the HTTP servers, and the embedded database.

    A supervisor that is killed earlier leaves its machines running, and nothing deletes them until the next start.
    """
    return math.ceil(shutdown_limit_s(fleet, fleet.max_workers) + SERVER_STOP_S + DATABASE_STOP_S)


@dataclass(frozen=True, slots=True)
class ProjectAnswers:
    """What the project shall be. `budget_per_day`, `image` and `url` are None for local fleets."""

    provider: str
    queue: str
    min_workers: int
    max_workers: int
    budget_per_day: str | None = None
    image: str | None = None
    url: str | None = None
    deploy: str | None = None

    @property
    def has_ssh(self) -> bool:
        """Windlass is installed on pods over SSH. In a container there is no key: the image starts the worker."""
        return self.provider == "runpod" and self.deploy not in ("docker", "kubernetes")

    @property
    def handler(self) -> str:
        """A file of this host does not reach rented machines, unless their image has it."""
        is_on_machines = self.provider == "local" or (self.provider == "runpod" and not self.has_ssh)
        return OWN_HANDLER if is_on_machines else _BUILT_IN_HANDLER


def render_config(answers: ProjectAnswers) -> str:
    # The result is TOML, not HTML.
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)  # noqa: S701
    environment.filters["toml"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = (files(__package__) / "project_template" / "windlass.toml.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        provider=answers.provider,
        queue=answers.queue,
        min_workers=answers.min_workers,
        max_workers=answers.max_workers,
        budget_per_day=answers.budget_per_day,
        image=answers.image,
        url=answers.url,
        deploy=answers.deploy,
        has_ssh=answers.has_ssh,
        handler=answers.handler,
        own_handler=OWN_HANDLER,
        currency=CURRENCIES.get(answers.provider),
        key=KEYS.get(answers.provider),
    )


def project_files(answers: ProjectAnswers, version: str) -> dict[str, str]:
    """The text of each file by its name. `version`: of Windlass. Raises ConfigError if the answers are not valid."""
    config_text = render_config(answers)
    fleet = check_project(config_text).fleets["default"]
    handler = (files(__package__) / "project_template" / "app.py.txt").read_text(encoding="utf-8")
    return {CONFIG_FILE: config_text, HANDLER_FILE: handler, **_deploy_files(answers, fleet, version)}


def check_project(config_text: str) -> Config:
    """Load the text with the real loader. Raises ConfigError."""
    with tempfile.TemporaryDirectory(prefix="windlass-init-") as folder:
        file = Path(folder) / CONFIG_FILE
        file.write_text(config_text, encoding="utf-8")
        try:
            loaded = load_config(file)
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(file), CONFIG_FILE)) from None
    check_worker_start(loaded.config)
    # Variables of the environment may be ignored: they are not among the answers.
    if ignored := [warning for warning in loaded.warnings if f"(from {file})" in warning]:
        raise ConfigError(". ".join(ignored).replace(str(file), CONFIG_FILE))
    return loaded.config


def write_project(folder: Path, texts: Mapping[str, str], *, may_replace: bool) -> None:
    """Raises BadInput if a file exists and may not be replaced, before any file is written, or if one cannot be."""
    present = [name for name in texts if os.path.lexists(folder / name)]
    if present and not may_replace:
        exist = "exists" if len(present) == 1 else "exist"
        raise BadInput(
            f"{', '.join(present)} {exist} in {folder}. Nothing was written: choose another folder, or replace "
            f"{'it' if len(present) == 1 else 'them'} with --force."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            _write(folder / name, text, may_replace=may_replace)
    except OSError as error:
        raise BadInput(f"cannot write {error.filename or folder}: {error.strerror}.") from None


def _write(target: Path, text: str, *, may_replace: bool) -> None:
    if not may_replace:
        # Refuses a file that appeared in the meantime, and does not follow a link.
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
        return
    # A reader sees the old file or the new one, and a link is replaced, not followed.
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


def _deploy_files(answers: ProjectAnswers, fleet: FleetConfig, version: str) -> dict[str, str]:
    """Next to windlass.toml: compose and kustomize read only files of their own folder."""
    key = KEYS.get(answers.provider)
    stop_s = supervisor_stop_s(fleet)
    if answers.deploy == "systemd":
        unit = _replaced(_deploy_file("systemd/windlass.service"), {"TimeoutStopSec=790": f"TimeoutStopSec={stop_s}"})
        return {"windlass.service": unit}
    if answers.deploy == "docker":
        return {"compose.yaml": _compose_file(key, stop_s, version)}
    if answers.deploy == "kubernetes":
        found = {
            name: _deploy_file(f"kubernetes/{name}")
            for name in ("kustomization.yaml", "up.yaml", "cycle.yaml", "service.yaml", "podmonitor.yaml")
        }
        # The files of the repository are for Runpod.
        found = {name: text.replace(KEYS["runpod"], key or KEYS["runpod"]) for name, text in found.items()}
        found["kustomization.yaml"] = _replaced(
            found["kustomization.yaml"], {"--kustomize deploy/kubernetes": "--kustomize ."}
        )
        return found
    return {}


def _compose_file(key: str | None, stop_s: int, version: str) -> str:
    changes = {
        "mkdir -p secrets app": "mkdir -p secrets",
        "#   cp windlass.toml ../../examples/hello.py app\n": "",
        '#   docker compose exec windlass windlass enqueue greetings \'{"name": "Ada"}\'\n': "",
        "    build:\n      context: ../..\n      dockerfile: deploy/docker/Dockerfile\n": (
            f"    # From a clone of Windlass: docker build -f deploy/docker/Dockerfile -t windlass:{version} .\n"
            f"    image: windlass:{version}\n"
        ),
        "      - ./app:/app:ro\n": "".join(
            f"      - ./{name}:/app/{name}:ro\n" for name in (CONFIG_FILE, HANDLER_FILE)
        ),
        "stop_grace_period: 790s": f"stop_grace_period: {stop_s}s",
    }
    if key is not None:
        name = key.lower()
        changes |= {
            "    secrets: [database_url]\n": f"    secrets: [database_url, {name}]\n",
            "    file: ./secrets/database_url\n": (
                f"    file: ./secrets/database_url\n  {name}:\n    file: ./secrets/{name}\n"
            ),
        }
    return _replaced(_deploy_file("docker/compose.yaml"), changes)


def _replaced(text: str, changes: Mapping[str, str]) -> str:
    for old, new in changes.items():
        if text.count(old) != 1:
            raise AssertionError(f"a deploy file has {text.count(old)} times {old!r}, not once")
        text = text.replace(old, new)
    return text


def _deploy_file(name: str) -> str:
    """From the installed package, or from the repository that this program runs from."""
    package = Path(__file__).parents[1]
    for root in (package / "deploy_files", package.parents[1] / "deploy"):
        if (root / name).is_file():
            return (root / name).read_text(encoding="utf-8")
    raise BadInput(f"this installation has no deploy file {name}. Install Windlass from its wheel or a clone.")
