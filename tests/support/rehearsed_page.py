"""Runs the commands of a documentation page on a host that is a folder.

Paths of the page under /etc, /srv and /var are folders of the test. Programs that would change the host or need the
internet are replaced: sudo runs the rest of its words, apt-get, useradd and ufw only record theirs, and systemctl
starts and stops the unit of Windlass as systemd would, with its working directory, environment and credentials.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

BLOCK = re.compile(r"^```(sh|toml)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCK_TIMEOUT_S = 400.0
PLACES = ("etc", "srv", "var/lib/windlass")
_SUDO = """\
#!/bin/bash
echo "sudo $*" >> "$HOST_ROOT/commands"
words=()
while [ $# -gt 0 ]; do
  case "$1" in
    -u|-g) shift 2 ;;
    *) words+=("$1"); shift ;;
  esac
done
exec env "${words[@]}"
"""
_SYSTEMCTL = """\
#!{python}
import os, re, signal, subprocess, sys, time
root = os.environ["HOST_ROOT"]
pid_file = root + "/windlass.pid"

def stop():
    if os.path.exists(pid_file):
        pid = int(open(pid_file).read())
        os.kill(pid, signal.SIGTERM)
        for _ in range(1200):
            if not os.path.exists("/proc/%d/stat" % pid) or open("/proc/%d/stat" % pid).read().split()[2] == "Z":
                break
            time.sleep(0.1)
        else:
            sys.exit("windlass did not stop")
        os.unlink(pid_file)

if sys.argv[1:] == ["stop", "windlass"]:
    stop()
elif sys.argv[1:] == ["enable", "--now", "windlass"]:
    unit = open(root + "/etc/systemd/system/windlass.service").read()
    for place in {places}:
        unit = unit.replace("/" + place, root + "/" + place)
    value = lambda name: re.search("^" + name + "=(.*)$", unit, re.M)[1]
    variable, _, folder = value("Environment").partition("=")
    environment = dict(os.environ, CREDENTIALS_DIRECTORY=root + "/etc/windlass", **{{variable: folder}})
    started = subprocess.Popen(
        value("ExecStart").split(), cwd=value("WorkingDirectory"), env=environment, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=open(root + "/up.log", "a"), stderr=subprocess.STDOUT,
    )
    open(pid_file, "w").write(str(started.pid))
"""
_RECORDING = "#!/bin/sh\nexit 0\n"


def blocks(page: str, section: str) -> list[tuple[str, str]]:
    """Language and text of the blocks in a section of the second level."""
    text = page.split(f"\n## {section}\n")[1].split("\n## ", maxsplit=1)[0]
    return [(found[1], found[2]) for found in BLOCK.finditer(text)]


@dataclass
class FolderHost:
    root: Path
    environment: Mapping[str, str]
    # Text of the page -> text that the test runs.
    replaced: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for place in (*PLACES, "etc/caddy", "etc/systemd/system", "srv/app", "bin", "home"):
            (self.root / place).mkdir(parents=True, exist_ok=True)
        programs = {"sudo": _SUDO, "systemctl": _SYSTEMCTL.format(python=sys.executable, places=repr(PLACES))}
        for name, text in {**dict.fromkeys(("apt-get", "useradd", "ufw"), _RECORDING), **programs}.items():
            (self.root / "bin" / name).write_text(text)
            (self.root / "bin" / name).chmod(0o755)

    def translated(self, text: str) -> str:
        for old, new in self.replaced.items():
            text = text.replace(old, new)
        return re.sub(rf"(?<![\w./-])/({'|'.join(PLACES)})\b", rf"{self.root}/\1", text)

    def run(self, commands: str, stdin: str = "") -> str:
        """All commands in one shell, in the user's home; each must succeed. Returns the output."""
        done = subprocess.run(
            ["bash", "-euc", self.translated(commands)],
            cwd=self.root / "home",
            env={
                **self.environment,
                "HOST_ROOT": str(self.root),
                "HOME": str(self.root / "home"),
                "PATH": f"{self.root / 'bin'}{os.pathsep}{os.environ['PATH']}",
            },
            input=stdin, capture_output=True, text=True, timeout=BLOCK_TIMEOUT_S, check=False,
        )  # fmt: skip
        log = self.root / "up.log"
        tail = log.read_text()[-3000:] if log.exists() else ""
        assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}\n{tail}"
        return done.stdout

    def kill(self) -> None:
        """End what systemctl started, if the page did not."""
        pid_file = self.root / "windlass.pid"
        if pid_file.exists():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(pid_file.read_text()), signal.SIGKILL)

    @property
    def commands(self) -> list[str]:
        return (self.root / "commands").read_text().splitlines()
