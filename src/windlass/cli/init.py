"""`windlass init`: writes windlass.toml, a handler and deploy files, from options or from a dialog at a terminal."""

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from windlass import __version__
from windlass.cli.options import command
from windlass.model.errors import BadInput, ConfigError
from windlass.wiring.project import (
    BUDGETS,
    CONFIG_FILE,
    CURRENCIES,
    DEPLOYMENTS,
    IMAGES,
    KEYS,
    OWN_HANDLER,
    PROVIDERS,
    ProjectAnswers,
    project_files,
    write_project,
)

# Wrong answers to one question before the dialog ends.
MAX_TRIES = 5
NO_DEPLOYMENT = "none"
# Options without a default for every project, and what they are.
_REQUIRED = {
    "--url": (
        "the address at which rented machines reach this host and its `windlass up`, "
        "for example https://windlass.example.com"
    ),
    "--image": "an image that starts a worker by itself, for example one of deploy/images",
}
# The options that give settings of the new file.
_OPTIONS = {
    "fleets.default.queues": "--queue",
    "fleets.default.min_workers": "--min",
    "fleets.default.max_workers": "--max",
    "fleets.default.budget_per_day": "--budget",
    "fleets.default.hetzner.image": "--image",
    "fleets.default.runpod.image": "--image",
    "api.url": "--url",
}
_Value = TypeVar("_Value")
Parse = Callable[[str], _Value]


@command
def init(
    folder: Annotated[Path, typer.Argument(help="Folder of the project. Created if missing.")] = Path(),
    provider: Annotated[
        str | None, typer.Option(help="Where workers run: local, hetzner or runpod.", metavar="NAME")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Budget per day, in the currency of the provider.", metavar="AMOUNT")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Image of the rented machines.", metavar="IMAGE")] = None,
    url: Annotated[
        str | None, typer.Option(help="URL of this control plane, as rented machines reach it.", metavar="URL")
    ] = None,
    min_: Annotated[int | None, typer.Option("--min", min=0, help="Minimum number of workers.", metavar="N")] = None,
    max_: Annotated[int | None, typer.Option("--max", min=1, help="Maximum number of workers.", metavar="N")] = None,
    queue: Annotated[str, typer.Option("--queue", "-q", help="Queue that the workers serve.", metavar="NAME")] = (
        "default"
    ),
    deploy: Annotated[
        str | None,
        typer.Option(help="Also write deploy files: systemd, docker or kubernetes.", metavar="KIND"),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: use defaults for what is not given.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
) -> None:
    """Write windlass.toml, a handler and deploy files for a new project.

    At a terminal it asks for what the options do not give. Existing files are kept unless --force is given.
    """
    is_dialog = not yes and sys.stdin.isatty() and sys.stdout.isatty()
    if not (is_dialog or yes):
        if provider is not None:
            _checked("--provider", provider, _provider)
        _refuse_missing(provider, {"--image": image, "--budget": budget, "--url": url, "--min": min_, "--max": max_})

    def value(option: str, question: str, given: _Value | None, parse: Parse[_Value], default: _Value | None) -> _Value:
        if given is not None:
            return _checked(option, str(given), parse)
        if is_dialog:
            return _ask(question, parse, default)
        if default is None:
            raise BadInput(f"{option} is missing. Give {_REQUIRED[option]}.")
        return default

    provider = value("--provider", "Where do workers run: local, hetzner or runpod?", provider, _provider, "local")
    deploy = value("--deploy", "Deploy files: none, systemd, docker or kubernetes?", deploy, _deployment, NO_DEPLOYMENT)
    if provider == "local":
        _refuse_options_of_machines({"--image": image, "--budget": budget, "--url": url}, deploy)
    else:
        default_image = None if provider == "runpod" and deploy in ("docker", "kubernetes") else IMAGES[provider]
        image = value("--image", "Image of the machines?", image, _text, default_image)
        question = f"Budget per day, in {CURRENCIES[provider]}?"
        budget = value("--budget", question, budget, _amount, BUDGETS[provider])
        url = value("--url", "URL of this control plane, as machines reach it?", url, _text, None)
    least = value("--min", "Minimum number of workers?", min_, _count, 0)
    most = value("--max", "Maximum number of workers?", max_, _count, 4 if provider == "local" else 2)
    if least > most:
        raise BadInput(f"--min is {least} and --max is {most}: the minimum must not exceed the maximum.")
    answers = ProjectAnswers(
        provider, queue, least, most, budget, image, url, None if deploy == NO_DEPLOYMENT else deploy
    )
    texts = _project_files(answers)
    write_project(folder, texts, may_replace=force)
    print(f"wrote {', '.join(texts)} in {folder.absolute()}\n\nnext:")
    for line in _next_steps(answers, folder):
        print(f"  {line}")


def _refuse_missing(provider: str | None, options: Mapping[str, object]) -> None:
    needed = ["--min", "--max"] if provider == "local" or provider is None else list(options)
    missing = [option for option in needed if options[option] is None]
    if provider is None:
        missing.insert(0, "--provider")
    if missing:
        raise BadInput(f"there is no terminal to ask at. Give {', '.join(missing)}, or --yes for the defaults.")


def _project_files(answers: ProjectAnswers) -> dict[str, str]:
    """Raises ConfigError. It names the options: the file that has the settings is not written yet."""
    try:
        return project_files(answers, __version__)
    except ConfigError as error:
        text = str(error)
        for setting, option in _OPTIONS.items():
            text = text.replace(f"{setting} (from {CONFIG_FILE})", option)
        raise ConfigError(text) from None


def _refuse_options_of_machines(options: Mapping[str, object], deploy: str) -> None:
    given = [option for option, value in options.items() if value is not None]
    if given:
        raise BadInput(f"{given[0]} is for rented machines, and --provider is local. Remove it.")
    if deploy == "kubernetes":
        raise BadInput(
            "--deploy kubernetes is for rented machines, and --provider is local: the control plane's container has no "
            "handler. Choose hetzner or runpod, or deploy with systemd or docker."
        )


def _ask(question: str, parse: Parse[_Value], default: _Value | None) -> _Value:
    shown = f" [{default}]" if default is not None else ""
    for _ in range(MAX_TRIES):
        try:
            answer = input(f"{question}{shown} ").strip()
        except EOFError:
            raise BadInput("the dialog was closed. Nothing was written.") from None
        if not answer and default is not None:
            return default
        try:
            return parse(answer)
        except ValueError as error:
            print(f"  {error}")
    raise BadInput(f"{MAX_TRIES} answers were not valid. Nothing was written.")


def _checked(option: str, given: str, parse: Parse[_Value]) -> _Value:
    try:
        return parse(given)
    except ValueError as error:
        raise BadInput(f"{option} is {given!r}: {error}.") from None


def _one_of(choices: tuple[str, ...]) -> Parse[str]:
    def parse(answer: str) -> str:
        if answer not in choices:
            raise ValueError(f"write one of {', '.join(choices)}")
        return answer

    return parse


_provider = _one_of(PROVIDERS)
_deployment = _one_of((NO_DEPLOYMENT, *DEPLOYMENTS))


def _text(answer: str) -> str:
    if not answer:
        raise ValueError("an answer is required")
    return answer


def _amount(answer: str) -> str:
    try:
        amount = Decimal(answer)
    except InvalidOperation:
        amount = Decimal(0)
    if not (amount.is_finite() and amount > 0):
        raise ValueError("write an amount above 0, for example 5.00")
    return answer


def _count(answer: str) -> int:
    if not (answer.isascii() and answer.isdigit()):
        raise ValueError("write a whole number")
    return int(answer)


def _next_steps(answers: ProjectAnswers, folder: Path) -> Iterator[str]:
    enqueue = f"""windlass enqueue {answers.queue} '{{"name": "Ada"}}'"""
    key = KEYS.get(answers.provider)
    if folder.absolute() != Path.cwd():
        yield f"cd {shlex.quote(str(folder))}"
    if answers.has_ssh:
        yield "ssh-keygen -q -t ed25519 -N '' -f id_ed25519     # opens the pods"
    if answers.deploy in (None, "systemd"):
        if key is not None:
            yield f"read -rs {key} && export {key}     # from the provider's console"
        yield "windlass doctor                  # checks the settings, the database and the provider"
        if key is not None:
            yield "windlass doctor --fleet default --live     # rents one machine for one task, and deletes it"
    if answers.deploy is None:
        yield "windlass up                      # in one terminal"
        yield f"{enqueue}     # in another; then: windlass status"
    elif answers.deploy == "systemd":
        yield "copy this folder to /srv/app, with a virtual environment in /srv/app/.venv and the user app"
        yield "sudo install -m 644 windlass.service /etc/systemd/system/"
        yield f"secrets: files /etc/windlass/DATABASE_URL{f' and /etc/windlass/{key}' if key else ''}, mode 600"
        yield "sudo systemctl enable --now windlass"
    elif answers.deploy == "docker":
        yield f"docker build -f deploy/docker/Dockerfile -t windlass:{__version__} .     # in a clone of Windlass"
        yield "create the files in secrets/     # the first lines of compose.yaml say how"
        if key is not None:
            yield f"the provider's key goes into secrets/{key.lower()}"
        yield "docker compose up --detach"
    else:
        yield "build deploy/docker/Dockerfile in a clone of Windlass, and name your image in up.yaml and cycle.yaml"
        yield "create the namespace and the secret     # the first lines of kustomization.yaml say how"
        yield "kubectl apply --kustomize ."
    if answers.handler != OWN_HANDLER:
        yield "your own handler (app.py) has to reach the machines: docs/deploying-code.md"
