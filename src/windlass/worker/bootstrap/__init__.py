"""Renders the user data of a machine: a cloud-init document that turns an empty Ubuntu into a worker.

The input is the fleet's bootstrap settings, the machine request and the control plane's URL. The only secret among them
is the join token, so no other secret can be in the output. The output is verified: it is YAML of at most 32 KiB without
placeholders, and contains the expected join file. The only files read are the user's template and CA certificate.
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
# In the folder of the join file, which refers to it by this name.
CA_FILE = "ca.pem"
# Several certificates, and less than half of what user data and the environment of a pod can hold.
MAX_CERTIFICATE_CHARACTERS = 16_384
BOOT_SCRIPT = "boot.sh"
FETCH_SCRIPT = "fetch_wheel.py"
# The name by which a custom template extends the default one.
DEFAULT_TEMPLATE = "windlass"
# Time between the drain deadline and the exit of the worker's process.
STOP_MARGIN_S = 30

# It appears in paths, unit files and the machine name.
_WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,126}")
# Ray accepts labels in the format of Kubernetes.
_RAY_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")
_PATH = re.compile(r"[A-Za-z0-9._~/-]*")
_TOKEN = re.compile(r"[\x21-\x7e]+")
_PLACEHOLDER = re.compile(r"\{\{|\{%")


def render_user_data(
    settings: BootstrapSettings, request: MachineRequest, url: str, *, stop_timeout_s: float = 600.0
) -> str:
    """`url`: address of the control plane. `stop_timeout_s`: how long a worker may take to drain.

    Raises BadInput for an invalid request and ConfigError for an unusable template. No message contains the join token.
    """
    join = _join(request, url)
    ca_pem = read_certificate(settings)
    if ca_pem is not None:
        join["ca_file"] = CA_FILE
    if settings.ray_address is not None and not _RAY_LABEL.fullmatch(request.name):
        raise BadInput(
            f"{request.name!r} is not a valid label of a Ray node. Give the fleet a shorter name of letters, digits, "
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
    document = _render(settings, values)
    problem = _problem(document, join)
    if problem is not None:
        raise ConfigError(f"{_template_name(settings)} {problem}.")
    return document


def script(name: str) -> str:
    """A file of this package, as it is written to the machine."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8").rstrip("\n")


def _join(request: MachineRequest, url: str) -> dict[str, str]:
    if not _WORKER_ID.fullmatch(request.name):
        raise BadInput(f"{request.name!r} is not a valid worker id: use at most 127 letters, digits and _ . : -.")
    if request.join_token is None or not _TOKEN.fullmatch(request.join_token):
        raise BadInput(f"{request.name} has no join token, which its machine needs to join.")
    return {"worker_id": request.name, "url": _checked_url(url), "join_token": request.join_token}


def _checked_url(url: str) -> str:
    """The URL without a trailing slash. A password in it would end up in the user data."""
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
            "the URL of the control plane is invalid. Write https://host:port, without user, password and query."
        )
    return url.rstrip("/")


def read_certificate(settings: BootstrapSettings) -> str | None:
    """The certificates of `ca_file`. Raises ConfigError."""
    if settings.ca_file is None:
        return None
    try:
        text = settings.ca_file.expanduser().read_text(encoding="ascii")
    except OSError as error:
        raise ConfigError(f"cannot read {settings.ca_file}: {error.strerror}. Check bootstrap.ca_file.") from None
    except (UnicodeDecodeError, RuntimeError):
        text = ""
    # A private key in the file would be copied to every machine.
    if "-----BEGIN CERTIFICATE-----" not in text or "PRIVATE KEY" in text:
        raise ConfigError(f"{settings.ca_file} (bootstrap.ca_file) must contain PEM certificates and no private key.")
    if len(text) > MAX_CERTIFICATE_CHARACTERS:
        raise ConfigError(
            f"{settings.ca_file} (bootstrap.ca_file) has {len(text):,} characters, of which a machine gets at most "
            f"{MAX_CERTIFICATE_CHARACTERS:,}: name a file with the control plane's authority only."
        )
    return text


def _render(settings: BootstrapSettings, values: dict[str, Any]) -> str:
    name = _template_name(settings)
    try:
        templates = {DEFAULT_TEMPLATE: script("cloud-init.yaml.j2") + "\n"}
        if settings.template is not None:
            templates[name] = settings.template.expanduser().read_text(encoding="utf-8")
        environment = jinja2.Environment(
            loader=jinja2.DictLoader(templates),
            undefined=jinja2.StrictUndefined,
            autoescape=False,  # noqa: S701 - not HTML; the yaml filter quotes values
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        environment.filters["yaml"] = quoted
        return environment.get_template(name if settings.template else DEFAULT_TEMPLATE).render(values)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{name} has a syntax error in line {error.lineno}: {error.message}.") from None
    except jinja2.TemplateError as error:
        # The message may name an undefined variable, but never contains a value.
        raise ConfigError(f"{name} cannot be rendered ({error.message or type(error).__name__}).") from None
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}. Check bootstrap.template.") from None
    except (RuntimeError, TypeError, ValueError, ArithmeticError, LookupError, yaml.YAMLError) as error:
        raise ConfigError(f"{name} cannot be rendered ({type(error).__name__}).") from None


def _template_name(settings: BootstrapSettings) -> str:
    return f"the bootstrap template {settings.template}" if settings.template else "the bootstrap document"


def quoted(value: Any) -> str:
    """A value (text, list or table) as one line of ASCII that YAML reads back unchanged.

    Braces that look like a placeholder are escaped, so a placeholder in the document is always the template's.
    """
    if isinstance(value, jinja2.Undefined):
        str(value)  # raises an error with the variable's name
    text = yaml.safe_dump(value, default_style='"', default_flow_style=True, width=math.inf, allow_unicode=False)
    return text.rstrip("\n").replace("{{", "{\\x7b").replace("{%", "{\\x25")


def _problem(document: str, join: dict[str, str]) -> str | None:
    """What is wrong with the document, as the end of a sentence. Does not quote it: that could reveal the token."""
    if not document.startswith(HEADER):
        return f"does not begin with the line {HEADER.strip()}, without which a machine ignores it"
    placeholder = _PLACEHOLDER.search(document)
    if placeholder is not None:
        line = document.count("\n", 0, placeholder.start()) + 1
        return f"leaves a placeholder in line {line} of its output"
    size = len(document.encode(errors="replace"))
    if size > MAX_USER_DATA_BYTES:
        return (
            f"renders {size:,} bytes of user data, more than the limit of {MAX_USER_DATA_BYTES:,}: "
            "move setup commands into a package or an image"
        )
    try:
        content = yaml.safe_load(document)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1} of its output)" if mark else ""
        return f"does not render YAML{where}: pass values through the yaml filter"
    written = content.get("write_files") if isinstance(content, dict) else None
    files_written = [file for file in written if isinstance(file, dict)] if isinstance(written, list) else []
    if not any(_is_join_file(file, join) for file in files_written):
        return f'does not write {JOIN_FILE} with permissions "0600" and the content join_json, which the worker needs'
    return None


def _is_join_file(file: dict[str, Any], join: dict[str, str]) -> bool:
    try:
        is_same = json.loads(file.get("content", "")) == join
    except (TypeError, ValueError):
        return False
    return file.get("path") == JOIN_FILE and file.get("permissions") == "0600" and is_same
