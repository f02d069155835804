"""Runs the command of an SSH session in an emulated pod. sshd forces every session through this program.

In the text of the command, paths of the pod (its mounts, its home, paths that exist under its root) are replaced by the
folders on this host. A script on standard input is not changed. The environment is that of a fresh login. That of the
container is in `/proc/1/environ`, and, altered, in the `/etc/rp_environment` of images that write it.
"""

import json
import os
import re
import sys

# An absolute path that is not part of a word or an address and does not follow a variable.
_PATH = re.compile(r"(?<![\w.~$}/@-])(?:/[\w.@%+-]+)+/?")
_KEPT_VARIABLES = ("LANG", "LC_ALL", "TERM", "SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY")


def map_paths(command: str, root: str, own: list[str]) -> str:
    """Replace paths under one of `own`, and paths that exist under the root."""

    def replace(match: "re.Match[str]") -> str:
        path = match[0]
        is_own = any(path == each or path.startswith(each.rstrip("/") + "/") for each in own)
        return root + path if is_own or os.path.exists(root + path) else path

    return _PATH.sub(replace, command)


def main(folder: str) -> int:
    with open(os.path.join(folder, "session.json")) as file:
        settings = json.load(file)
    command = os.environ.get("SSH_ORIGINAL_COMMAND")
    for text, message in settings["failures"].items():
        if command and text in command:
            print(message, file=sys.stderr)
            return 1
    environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ} | settings["environment"]
    os.chdir(environment["HOME"])
    shell = settings["shell"]
    words = [shell, "-c", map_paths(command, settings["root"], settings["own"])] if command else [shell, "-l"]
    sys.stdout.flush()
    return os.execve(shell, words, environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
