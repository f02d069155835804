"""The user data of a machine: a cloud-init document that makes a worker of an empty Ubuntu.

`render_user_data` decides nothing and knows nothing but what it is given: the fleet's bootstrap settings, the request
for the machine, the control plane's address. A secret that is not handed in cannot be in it; the only one that is, is
the request's join token. What it returns has been read back: it is YAML, at most 32 KiB, without a placeholder left,
and holds the join file with exactly what was meant. No file is read but a template and a certificate of the user's own.
"""

import json
import math
import re
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

import jinja2
import yaml

from windlass.model.bootstrap import MAX_USER_DATA_BYTES, BootstrapSettings
from windlass.model.errors import BadInput, ConfigError
from windlass.model.machine import MachineRequest

HEADER = "#cloud-config\n"
JOIN_FILE = "/etc/windlass/join.json"
# Beside the join file, which names it so.
CA_FILE = "ca.pem"
BOOT_SCRIPT = "boot.sh"
FETCH_SCRIPT = "fetch_wheel.py"
# By this name a template of the user's own extends ours.
OUR_TEMPLATE = "windlass"
# From the last moment of a drain until the worker's process is gone.
STOP_MARGIN_S = 30

# It stands in paths, in unit files and in the name of the machine.
_WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,126}")
# As Kubernetes has it: Ray takes no other labels.
_RAY_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")
_PATH = re.compile(r"[A-Za-z0-9._~/-]*")
_TOKEN = re.compile(r"[\x21-\x7e]+")
_PLACEHOLDER = re.compile(r"\{\{|\{%")


def render_user_data(
    settings: BootstrapSettings, request: MachineRequest, url: str, *, stop_timeout_s: float = 600.0
) -> str:
    """`url`: where the machine finds the control plane. `stop_timeout_s`: how long a worker may take to drain.

    Raises BadInput for a request that cannot be written down and ConfigError for a template that cannot be used; no
    message of either repeats the join token.
    """
    join = _join(request, url)
    ca_pem = _certificate(settings)
    if ca_pem is not None:
        join["ca_file"] = CA_FILE
    if settings.ray_address is not None and not _RAY_LABEL.fullmatch(request.name):
        raise BadInput(
            f"{request.name!r} cannot be a label of a Ray node: give the fleet a shorter name, of letters, digits, "
            "_ . and -."
        )
    values = {
        "join_json": json.dumps(join),
        "worker_id": request.name,
        "url": join["url"],
        "fleet": request.fleet,
        "slot": request.slot,
        "settings": settings,
        "stop_timeout_s": math.ceil(stop_timeout_s) + STOP_MARGIN_S,
        "ca_pem": ca_pem,
        "boot_sh": script(BOOT_SCRIPT),
        "fetch_wheel_py": script(FETCH_SCRIPT),
    }
    document = _rendered(settings, values)
    problem = _problem(document, join)
    if problem is not None:
        raise ConfigError(f"{_template_name(settings)} {problem}.")
    return document


def script(name: str) -> str:
    """A file of this package, as it is written onto the machine."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8").rstrip("\n")


def _join(request: MachineRequest, url: str) -> dict[str, str]:
    if not _WORKER_ID.fullmatch(request.name):
        raise BadInput(f"{request.name!r} cannot be a worker's id: letters, digits and _ . : -, at most 127 of them.")
    if request.join_token is None or not _TOKEN.fullmatch(request.join_token):
        raise BadInput(f"{request.name} has no join token, and without one its machine cannot join.")
    return {"worker_id": request.name, "url": _checked_url(url), "join_token": request.join_token}


def _checked_url(url: str) -> str:
    """Without a slash at its end. A password in it would be in the user data."""
    try:
        parts = urlsplit(url)
        is_sound = (
            url.isascii()
            and url.isprintable()
            and parts.scheme in {"http", "https"}
            and _HOST.fullmatch(parts.hostname or "")
            and "@" not in parts.netloc
            and (parts.port is None or parts.port > 0)
            and _PATH.fullmatch(parts.path)
            and not set("?#\\ ") & set(url)
        )
    except ValueError:
        is_sound = False
    if not is_sound:
        raise BadInput(
            "the control plane's address cannot be used: write https://host:port, without user, password and query."
        )
    return url.rstrip("/")


def _certificate(settings: BootstrapSettings) -> str | None:
    if settings.ca_file is None:
        return None
    try:
        text = settings.ca_file.expanduser().read_text(encoding="ascii")
    except OSError as error:
        raise ConfigError(f"{settings.ca_file} cannot be read ({error.strerror}): check bootstrap.ca_file.") from None
    except (UnicodeDecodeError, RuntimeError):
        text = ""
    # A key in the same file would be on every machine.
    if "-----BEGIN CERTIFICATE-----" not in text or "PRIVATE KEY" in text:
        raise ConfigError(f"{settings.ca_file} (bootstrap.ca_file) must hold certificates in PEM, and no key.")
    return text


# ----------------------------------------------------------------------------------------------------- the template


def _rendered(settings: BootstrapSettings, values: dict[str, Any]) -> str:
    name = _template_name(settings)
    try:
        templates = {OUR_TEMPLATE: script("cloud-init.yaml.j2") + "\n"}
        if settings.template is not None:
            templates[name] = settings.template.expanduser().read_text(encoding="utf-8")
        environment = jinja2.Environment(
            loader=jinja2.DictLoader(templates),
            undefined=jinja2.StrictUndefined,
            autoescape=False,  # noqa: S701 - this is no HTML; values are quoted for YAML by the filter
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        environment.filters["yaml"] = quoted
        return environment.get_template(name if settings.template else OUR_TEMPLATE).render(values)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{name} is no template (line {error.lineno}: {error.message}).") from None
    except jinja2.TemplateError as error:
        # Of an undefined name the message says which; none repeats a value.
        raise ConfigError(f"{name} cannot be rendered ({error.message or type(error).__name__}).") from None
    except OSError as error:
        raise ConfigError(f"{name} cannot be read ({error.strerror}): check bootstrap.template.") from None
    except (RuntimeError, TypeError, ValueError, ArithmeticError, LookupError, yaml.YAMLError) as error:
        raise ConfigError(f"{name} cannot be rendered ({type(error).__name__}).") from None


def _template_name(settings: BootstrapSettings) -> str:
    return f"the bootstrap template {settings.template}" if settings.template else "the bootstrap document"


def quoted(value: Any) -> str:
    """Any text (or list or table of it) on one line, as YAML reads it back unchanged, in ASCII.

    Braces that would look like a placeholder are written as their code: what looks like one in the document was left
    there by the template, never by a value.
    """
    if isinstance(value, jinja2.Undefined):
        str(value)  # raises, and says which name it was
    text = yaml.safe_dump(value, default_style='"', default_flow_style=True, width=math.inf, allow_unicode=False)
    return text.rstrip("\n").replace("{{", "{\\x7b").replace("{%", "{\\x25")


# ---------------------------------------------------------------------------------------------------- what came of it


def _problem(document: str, join: dict[str, str]) -> str | None:
    """What is wrong with it, as the end of a sentence. Says nothing of what is in it: that may be the token."""
    if not document.startswith(HEADER):
        return f"does not begin with the line {HEADER.strip()}: a machine would ignore it"
    placeholder = _PLACEHOLDER.search(document)
    if placeholder is not None:
        line = document.count("\n", 0, placeholder.start()) + 1
        return f"left a placeholder in line {line} of what it made"
    size = len(document.encode(errors="replace"))
    if size > MAX_USER_DATA_BYTES:
        return (
            f"makes {size:,} bytes of user data and a machine takes {MAX_USER_DATA_BYTES:,}: "
            "move setup commands into a package or an image"
        )
    try:
        content = yaml.safe_load(document)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1} of what it made)" if mark else ""
        return f"does not make YAML{where}: values go through the filter yaml"
    written = content.get("write_files") if isinstance(content, dict) else None
    files_written = [file for file in written if isinstance(file, dict)] if isinstance(written, list) else []
    if not any(_is_join_file(file, join) for file in files_written):
        return f'does not write {JOIN_FILE} with permissions "0600" and the content join_json: the worker needs it'
    return None


def _is_join_file(file: dict[str, Any], join: dict[str, str]) -> bool:
    try:
        is_same = json.loads(file.get("content", "")) == join
    except (TypeError, ValueError):
        return False
    return file.get("path") == JOIN_FILE and file.get("permissions") == "0600" and is_same
