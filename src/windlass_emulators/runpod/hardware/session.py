"""What an SSH session of an emulated pod runs: the client's command, with the pod's own paths mapped into its folder.

sshd forces every session through here. A path that is the pod's (its mounts, its home, whatever exists under its root)
is replaced by the folder that stands for it, in the text of the command; a script that comes by standard input is not
touched. The environment is a fresh login's, without the container's own: as in a real pod, that is in
`/etc/rp_environment`.
"""

import json
import os
import re
import sys

# Neither in the middle of a word or of an address, nor after a variable.
_PATH = re.compile(r"(?<![\w.~$}/@-])(?:/[\w.@%+-]+)+/?")
_KEPT = ("LANG", "LC_ALL", "TERM", "SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY")


def mapped(command: str, root: str, own: list[str]) -> str:
    """Paths under one of `own`, and those that exist under the root, as this host knows them."""

    def place(match: "re.Match[str]") -> str:
        path = match[0]
        is_own = any(path == each or path.startswith(each.rstrip("/") + "/") for each in own)
        return root + path if is_own or os.path.exists(root + path) else path

    return _PATH.sub(place, command)


def main(folder: str) -> int:
    with open(os.path.join(folder, "session.json")) as file:
        settings = json.load(file)
    command = os.environ.get("SSH_ORIGINAL_COMMAND")
    for text, said in settings["failures"].items():
        if command and text in command:
            print(said, file=sys.stderr)
            return 1
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ} | settings["environment"]
    os.chdir(environment["HOME"])
    shell = settings["shell"]
    words = [shell, "-c", mapped(command, settings["root"], settings["own"])] if command else [shell, "-l"]
    sys.stdout.flush()
    return os.execve(shell, words, environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
