"""Runs `windlass` as a process, and returns its output and exit code."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.forked_programs import can_fork, run_forked

# Above the time limit of `windlass demo`.
TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Completed:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self
        return json.loads(self.out)


class CommandLine:
    """`windlass` in a folder, without the settings in the environment of the test run."""

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self._env = dict(env or {})

    def with_env(self, **env: str) -> "CommandLine":
        return CommandLine(self.folder, {**self._env, **env})

    def __call__(self, *args: object, stdin: str | bytes = "", python: tuple[str, ...] = ()) -> Completed:
        words, given, env = [*map(str, args)], stdin.encode() if isinstance(stdin, str) else stdin, self.environment()
        if not python and can_fork(words, env):
            code, out, err = run_forked(words, stdin=given, folder=self.folder, env=env, timeout_s=TIMEOUT_S)
            return Completed(code, out.decode(), err.decode())
        done = subprocess.run(
            [sys.executable, *python, "-m", "windlass", *words],
            input=given,
            capture_output=True,
            cwd=self.folder,
            env=env,
            timeout=TIMEOUT_S,
            check=False,
        )
        return Completed(done.returncode, done.stdout.decode(), done.stderr.decode())

    def start(self, *args: object, **options: Any) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "windlass", *map(str, args)],
            cwd=self.folder,
            env=self.environment(),
            text=True,
            **options,
        )

    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("WINDLASS_") and k != "DATABASE_URL"}
        return {**kept, **self._env}
