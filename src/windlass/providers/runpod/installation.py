"""The command that installs Windlass and the handler's requirements on a pod, and the meaning of its failure. Pure.

The pod gets Windlass from the control plane, so it runs the control plane's version, whatever its image brings. It
downloads the wheel with its join token. Requirements may contain a second secret, the credentials of a package index:
only the user who installs can read the files with them, and `secrets` lists them for the mask of error messages. Each
step has its own code.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from urllib.parse import unquote

# On the container's disk: scripts, wheel, log and environment.
INSTALL_FOLDER = "/var/lib/windlass"
ENVIRONMENT_FOLDER = f"{INSTALL_FOLDER}/env"
INSTALL_SCRIPT = "install.sh"
INSTALL_FAILED = "INSTALL_FAILED"
CODES = frozenset({"PYTHON_MISSING", "VENV_FAILED", "WHEEL_UNAVAILABLE", INSTALL_FAILED, "REQUIREMENTS_FAILED"})
# The script gives up before the command times out, so that its message arrives.
STOP_BEFORE_S = 5.0
_FAILURE = re.compile(r"([A-Z_]+): (.*)")
# Options of a requirements file that say where packages come from.
_INDEX_OPTION = re.compile(
    r"(-i|--index-url|--extra-index-url|-f|--find-links|--no-index|--trusted-host|--prefer-binary|--only-binary|"
    r"--no-binary|--pre)(?=[\s=]|$)"
)
# User and password of an address.
_CREDENTIALS = re.compile(r"://([^\s/?#@:]*)(?::([^\s/?#@]*))?@")


@dataclass(frozen=True, slots=True)
class PodInstallation:
    """`scripts` are the files that the pod runs, by name; one of them is INSTALL_SCRIPT."""

    version: str
    scripts: Mapping[str, str]
    requirements: tuple[str, ...] = ()
    has_image_packages: bool = True

    @property
    def secrets(self) -> tuple[str, ...]:
        """Credentials in the addresses of the requirements: passwords, and users without one, which are tokens."""
        found = [match[2] or match[1] for line in self.requirements for match in _CREDENTIALS.finditer(line)]
        return tuple(dict.fromkeys(form for secret in found for form in (secret, unquote(secret)) if form))

    def command(self, join_file: str, timeout_s: float) -> str:
        index_options = [line for line in self.requirements if _INDEX_OPTION.match(line.strip())]
        files = {
            **self.scripts,
            "requirements.txt": _text(self.requirements),
            "index.txt": _text(index_options),
            **({"has-image-packages": "yes\n"} if self.has_image_packages else {}),
        }
        # Renamed when complete: another orchestrator may run the script at this moment.
        writes = [
            f"printf %s {shlex.quote(content)} > {name}.$$ && mv {name}.$$ {name} || exit 1"
            for name, content in files.items()
        ]
        limit_s = max(1, ceil(timeout_s - STOP_BEFORE_S))
        return "\n".join([
            "umask 022",
            f"mkdir -p {INSTALL_FOLDER} && cd {INSTALL_FOLDER} || exit 1",
            "umask 077",
            *writes,
            # The environment may be used by other users.
            "umask 022",
            f"exec sh {INSTALL_FOLDER}/{INSTALL_SCRIPT} {join_file} {shlex.quote(self.version)} {limit_s}",
        ])  # fmt: skip


def _text(lines: "list[str] | tuple[str, ...]") -> str:
    return "".join(f"{line}\n" for line in lines)


def failure_of(problem: str) -> tuple[str, str]:
    """Code and message of a failed installation, from the last line of its output."""
    found = _FAILURE.fullmatch(problem)
    return (found[1], found[2]) if found is not None and found[1] in CODES else (INSTALL_FAILED, problem)
