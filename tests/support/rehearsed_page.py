"""Runs the commands of a documentation page on a host that is a folder.

Paths of the page under /etc, /srv and /var are below that folder. Programs that would change the host or need the
internet are replaced: apt-get and ufw only record their words, useradd creates the home, and systemctl starts and stops
the unit of Windlass (rehearsed_systemctl.py).

If root runs the test, the person of the page and its user `app` are two other users of this host, with homes that only
they can read, as on Ubuntu; sudo changes between them, without the working directory's rights. Another user cannot
change users: then all of them are that user, and file permissions are not rehearsed.
"""

import contextlib
import grp
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

BLOCK = re.compile(r"^```(sh|toml)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCK_TIMEOUT_S = 400.0
PROBE_TIMEOUT_S = 30.0
PLACES = ("etc", "srv", "var/lib")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Users of every Debian and most other systems.
PERSON, APP = "daemon", "nobody"
# A person who may use sudo: no right to any file, but that to become another user.
_AS_PERSON = ("--clear-groups", "--inh-caps=+setuid,+setgid", "--ambient-caps=+setuid,+setgid")
_SUDO = """\
#!/bin/bash
echo "sudo $*" >> "$HOST_ROOT/commands"
user=root
if [ "$1" = -u ]; then user=$2; shift 2; fi
words=()
for word in "$@"; do
  # Owner and group of files, as in `install -o app`.
  case "$previous $word" in
    "-o app") words+=("$HOST_APP_ID") ;;
    "-g app") words+=("$HOST_APP_GROUP") ;;
    *) words+=("$word") ;;
  esac
  previous=$word
done
[ -n "${HOST_USER_app:-}" ] || exec env "${words[@]}"
if [ "$user" = root ]; then
  exec setpriv --reuid=0 --regid=0 --clear-groups -- env "${words[@]}"
fi
exec setpriv --reuid=0 --regid=0 --clear-groups -- \\
  setpriv --reuid="$HOST_USER_app" --regid="$HOST_APP_GROUP" --clear-groups --inh-caps=-all --ambient-caps=-all -- \\
  env HOME="$HOST_ROOT/srv/app" "${words[@]}"
"""
_USERADD = """\
#!/bin/bash
home=
while [ $# -gt 1 ]; do
  if [ "$1" = --home-dir ]; then home=$2; fi
  shift
done
install -d -o "$HOST_APP_ID" -g "$HOST_APP_GROUP" -m 750 "$home"
"""
_APT_GET = """\
#!/bin/sh
case " $* " in *" install "*" caddy "*) mkdir -p "$HOST_ROOT/etc/caddy" ;; esac
"""
_RECORDING = "#!/bin/sh\nexit 0\n"


def blocks(page: str, section: str) -> list[tuple[str, str]]:
    """Language and text of the blocks in a section of the second level."""
    text = page.split(f"\n## {section}\n")[1].split("\n## ", maxsplit=1)[0]
    return [(found[1], found[2]) for found in BLOCK.finditer(text)]


def can_change_users() -> bool:
    """Whether this test may become others, who can use a Python of the system with venv."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return False
    probe = "import sys, ensurepip; sys.exit(sys.version_info < (3, 11))"
    words = ["setpriv", f"--reuid={APP}", f"--regid={_group_of(APP)}", "--clear-groups", "python3", "-c", probe]
    done = subprocess.run(
        words, env={"PATH": SYSTEM_PATH}, cwd="/", capture_output=True, timeout=PROBE_TIMEOUT_S, check=False
    )
    return done.returncode == 0


def _group_of(user: str) -> str:
    return grp.getgrgid(pwd.getpwnam(user).pw_gid).gr_name


@dataclass
class FolderHost:
    root: Path
    environment: Mapping[str, str]
    # Text of the page -> text that the test runs.
    replaced: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.changes_users = can_change_users()
        for place in (*PLACES, "etc/systemd/system", "bin", "home"):
            (self.root / place).mkdir(parents=True, exist_ok=True)
        systemctl = f'#!/bin/sh\nexec {sys.executable} -S {Path(__file__).with_name("rehearsed_systemctl.py")} "$@"\n'
        programs = {
            "sudo": _SUDO, "useradd": _USERADD, "apt-get": _APT_GET, "ufw": _RECORDING, "systemctl": systemctl,
        }  # fmt: skip
        for name, text in programs.items():
            (self.root / "bin" / name).write_text(text)
            (self.root / "bin" / name).chmod(0o755)
        self.commands_file.touch()
        self.commands_file.chmod(0o666)

    @property
    def commands_file(self) -> Path:
        return self.root / "commands"

    @property
    def home(self) -> Path:
        return self.root / "home"

    def give_home(self) -> None:
        """The person's home, with what the test put there, belongs to the person alone."""
        self.home.chmod(0o750)
        if self.changes_users:
            person = pwd.getpwnam(PERSON)
            for path in (self.home, *self.home.rglob("*")):
                os.chown(path, person.pw_uid, person.pw_gid)

    def translated(self, text: str) -> str:
        for old, new in self.replaced.items():
            text = text.replace(old, new)
        return re.sub(rf"(?<![\w./-])/({'|'.join(PLACES)})\b", rf"{self.root}/\1", text)

    def run(self, commands: str, stdin: str = "") -> str:
        """All commands in one shell, in the person's home; each must succeed. Returns the output."""
        words = ["bash", "-euc", f'cd "$HOME"\n{self.translated(commands)}']
        environment = {**self.environment, "HOST_ROOT": str(self.root), "HOME": str(self.home)}
        path, app, group = os.environ["PATH"], os.getuid(), os.getgid()
        if self.changes_users:
            words = ["setpriv", f"--reuid={PERSON}", f"--regid={_group_of(PERSON)}", *_AS_PERSON, "--", *words]
            path, app, group = SYSTEM_PATH, pwd.getpwnam(APP).pw_uid, pwd.getpwnam(APP).pw_gid
            environment["HOST_USER_app"] = APP
        environment |= {"HOST_APP_ID": str(app), "HOST_APP_GROUP": str(group)}
        done = subprocess.run(
            words,
            cwd="/",
            env={**environment, "PATH": f"{self.root / 'bin'}{os.pathsep}{path}"},
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
        return self.commands_file.read_text().splitlines()
