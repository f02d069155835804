"""From a pod that runs to a worker: look it over, then start its program, once.

Each thing that can be wrong with a pod has a code of its own: SSH_UNREACHABLE, SSH_HOST_KEY_CHANGED,
STORAGE_NOT_MOUNTED, GPU_NOT_DETECTED, DISK_FULL, DEPENDENCY_MISSING, START_SCRIPT_FAILED. One that is gone meanwhile is
not waited for: MACHINE_GONE. While the API does not say where a pod is, it is looked for where it was last; that nobody
answers there says nothing of the pod, so no time limit condemns it.

Once, whoever asks and however often: a folder on the pod's own disk is the marker. Making it is atomic, and whoever
makes it starts the program in the same breath, in the pod's own shell: a connection that breaks, or an orchestrator
that dies, changes nothing about it. Whoever finds the marker starts nothing. A pod on which the marker was made and
nothing was started (its disk was full at that very moment) is never heard of, and is ended like any other that is not.
"""

import asyncio
import random
import shlex
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from math import ceil

from windlass.model.errors import NotPrepared, Throttled, Unavailable
from windlass.model.machine import Preparation
from windlass.model.redaction import Mask
from windlass.model.runpod import JOIN_FILE, RunpodSettings
from windlass.ports.provider import OnHostKey
from windlass.providers.runpod.errors import RunpodError
from windlass.providers.runpod.ssh import CommandResult, Endpoint, HostKeyChanged, OpenShell, Shell, Unreachable

# From one attempt to get in to the next: a pod's sshd starts some seconds after the pod.
RETRY_S = 5.0
# Of what a command said, this much goes into the event.
MAX_LINES = 20
MAX_CHARACTERS = 2000
FOLDER = "/etc/windlass"
MARKER = f"{FOLDER}/launch"
STATUS = f"{MARKER}/status"
LOG = f"{FOLDER}/worker.log"
# When it is longer, its end is put aside and it is emptied: there are two files at most, each of this size and what can
# be printed from one look to the next.
MAX_LOG_BYTES = 4 * 1024 * 1024
LOG_CHECK_S = 5.0
# Where Runpod's images put the container's environment, which a login does not have.
ENVIRONMENT = "/etc/rp_environment"
WATCH_STEP_S = 0.2
SSH_UNREACHABLE = "SSH_UNREACHABLE"
_KB_PER_GB = 1_000_000 / 1.024
# Where the pod is reached now; None while it is not. Raises Trouble, Throttled, and NotPrepared if it never will be.
Where = Callable[[], Awaitable[Endpoint | None]]


@dataclass(frozen=True, slots=True)
class Check:
    code: str
    # As in "the storage is mounted".
    what: str
    command: str
    # What is wrong, by what it said; None if nothing is.
    problem: Callable[[str], str | None] = lambda _: None


class Preparer:
    """`mask`: whatever a pod's commands print goes into events and reasons."""

    def __init__(
        self,
        settings: RunpodSettings,
        open_shell: OpenShell,
        rng: random.Random | None = None,
        retry_s: float = RETRY_S,
        mask: Mask = Mask(),  # noqa: B008 - a value
    ) -> None:
        self._settings = settings
        self._open_shell = open_shell
        self._rng = rng or random.Random()  # noqa: S311
        self._retry_s = retry_s
        self._mask = mask

    async def prepare(
        self, pod: str, where: Where, host_key: str | None, on_host_key: OnHostKey, last_known: Endpoint | None = None
    ) -> Preparation:
        """Raises NotPrepared; Unavailable if we could not know enough to say that. `pod`: as it is called in what is
        said about it. `last_known`: where it was reached before."""
        attempt = _ProvisioningAttempt(pod, host_key, on_host_key, last_known, self._mask)
        try:
            async with asyncio.timeout(self._settings.ssh.timeout_s):
                while not await self._is_done(attempt, where):  # noqa: ASYNC110 - it is the pod that is waited for
                    await asyncio.sleep(self._retry_s * (0.5 + self._rng.random()))
        except TimeoutError:
            why = f"it was not done within {self._settings.ssh.timeout_s:g} s ({attempt.last})"
            if attempt.was_blind and attempt.code == SSH_UNREACHABLE:
                raise Unavailable(f"preparing {pod}: {why}; where it is could not be asked all the time") from None
            raise attempt.failure(why) from None
        return Preparation(attempt.host_key)

    async def _is_done(self, attempt: "_ProvisioningAttempt", where: Where) -> bool:
        attempt.code = SSH_UNREACHABLE
        is_blind = False
        try:
            # Anew each time: the port may be another.
            endpoint = attempt.last_known = await where()
            attempt.last = "it has no public port for SSH yet"
        except (RunpodError, Throttled) as error:
            is_blind = attempt.was_blind = True
            endpoint, attempt.last = attempt.last_known, str(error)
        if endpoint is None:
            return False
        try:
            async with self._open_shell(endpoint, attempt.host_key) as shell:
                await attempt.met(shell.host_key)
                await self._work(attempt, shell)
        except HostKeyChanged as error:
            if is_blind:
                # Its port may be somebody else's by now.
                attempt.last = str(error)
                return False
            attempt.code = "SSH_HOST_KEY_CHANGED"
            raise attempt.failure(str(error)) from error
        except Unreachable as error:
            attempt.last = str(error)
            return False
        return True

    async def _work(self, attempt: "_ProvisioningAttempt", shell: Shell) -> None:
        limit_s = self._settings.ssh.command_timeout_s
        for check in checks(self._settings):
            attempt.code, attempt.last = check.code, f"looking whether {check.what}"
            said = await shell.run(check.command, limit_s)
            problem = check.problem(said.output) if said.status == 0 else how_it_ended(said, limit_s, self._mask)
            if problem is not None:
                raise attempt.failure(f"it is not so that {check.what}: {problem}", said.output)
        attempt.code, attempt.last = "START_SCRIPT_FAILED", "starting its worker"
        said = await shell.run(launch(self._settings), limit_s + self._settings.ssh.start_watch_s)
        if said.status != 0:
            raise attempt.failure(f"its worker was not started: {how_it_ended(said, limit_s, self._mask)}", said.output)


@dataclass(slots=True)
class _ProvisioningAttempt:
    """How far it has come."""

    pod: str
    host_key: str | None
    on_host_key: OnHostKey
    last_known: Endpoint | None
    mask: Mask
    code: str = SSH_UNREACHABLE
    last: str = "nothing was tried"
    # Whether the API once did not say where the pod is.
    was_blind: bool = False

    async def met(self, host_key: str) -> None:
        """Whoever comes after us, should we die here, must believe nobody else."""
        if self.host_key is None:
            await self.on_host_key(host_key)
            self.host_key = host_key

    def failure(self, why: str, output: str = "") -> NotPrepared:
        words = self.mask(f"preparing {self.pod}: {why}")
        return NotPrepared(self.code, words, last_lines(output, self.mask), self.host_key)


def how_it_ended(said: CommandResult, limit_s: float, mask: Mask) -> str:
    if said.status is None:
        return f"no answer within {limit_s:g} s"
    lines = last_lines(said.output, mask).splitlines()
    return lines[-1] if lines else f"it ended with {said.status}"


def last_lines(output: str, mask: Mask) -> str:
    # Masked before it is cut: half of a secret would not be known as one.
    lines = [line.rstrip() for line in mask(output).splitlines() if line.strip()]
    return "\n".join(lines[-MAX_LINES:])[-MAX_CHARACTERS:]


# ------------------------------------------------------------------------------------------------------------ checks


def checks(settings: RunpodSettings) -> Iterator[Check]:
    """In the order in which they are made."""
    path, ssh = settings.storage_path, settings.ssh
    if path is not None:
        is_mounted = f"( mountpoint {path} || grep ' {path} ' /proc/mounts )"
        is_writable = f"{{ test -w {path} || {{ echo {path} cannot be written; exit 1; }}; }}"
        yield Check("STORAGE_NOT_MOUNTED", f"{path} is mounted and writable", f"{is_mounted} && {is_writable}")
    query = "nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits"
    yield Check("GPU_NOT_DETECTED", "its GPU answers", query, lambda said: missing_gpus(said, settings.gpu_count))
    if ssh.min_free_disk_gb > 0:
        what = f"{ssh.min_free_disk_gb:g} GB of its disk are free"
        yield Check("DISK_FULL", what, "df -P -k /", lambda said: lack_of_disk(said, ssh.min_free_disk_gb))
    for command in ssh.checks:
        yield Check("DEPENDENCY_MISSING", f"`{command}` succeeds", command)
    yield Check("START_SCRIPT_FAILED", "it knows how to join", WRITE_JOIN_FILE)


def missing_gpus(said: str, wanted: int) -> str | None:
    sizes = [line.rpartition(",")[2].strip() for line in said.splitlines() if "," in line]
    found = sum(size.isdecimal() and int(size) > 0 for size in sizes)
    return None if found >= wanted else f"{found} of {wanted} GPUs have memory"


def lack_of_disk(said: str, wanted_gb: float) -> str | None:
    lines = [line.split() for line in said.splitlines() if line.strip()]
    free = lines[-1][3] if lines and len(lines[-1]) > 3 else ""
    if not free.isdecimal():
        return "df says something that cannot be read"
    free_gb = int(free) / _KB_PER_GB
    return None if free_gb >= wanted_gb else f"{free_gb:.1f} GB are"


# ------------------------------------------------------------------------------------------------------------ starting

# Of an image that does not write it by itself: from the container's environment, which a login does not have.
_TAKE_ENVIRONMENT = f"if [ -r {ENVIRONMENT} ] && sh -n {ENVIRONMENT} 2>/dev/null; then . {ENVIRONMENT}; fi"
WRITE_JOIN_FILE = f"""\
umask 077
mkdir -p {FOLDER} || exit 1
[ -s {JOIN_FILE} ] && exit 0
{_TAKE_ENVIRONMENT}
[ -n "$WINDLASS_JOIN" ] || WINDLASS_JOIN=$(tr '\\0' '\\n' < /proc/1/environ | sed -n 's/^WINDLASS_JOIN=//p')
[ -n "$WINDLASS_JOIN" ] || {{ echo "WINDLASS_JOIN is not in the container's environment"; exit 1; }}
printf %s "$WINDLASS_JOIN" > {JOIN_FILE}.new && mv {JOIN_FILE}.new {JOIN_FILE}"""


def launch(settings: RunpodSettings) -> str:
    """Start it unless somebody has, and watch it for a moment. Ends with 0 if it was started, now or before, and has
    not failed since."""
    ssh = settings.ssh
    cd = f"cd {settings.storage_path}" if settings.storage_path is not None else 'cd "$HOME"'
    program = f"""\
{_TAKE_ENVIRONMENT}
unset WINDLASS_JOIN
: > {LOG}
while sleep {LOG_CHECK_S} && kill -0 $$; do
[ $(wc -c < {LOG}) -gt {MAX_LOG_BYTES} ] || continue
tail -c {MAX_LOG_BYTES} {LOG} > {LOG}.1
: > {LOG}
done &
(
{cd}
{ssh.start_command}
) >> {LOG} 2>&1
echo $? > {STATUS}.new; mv {STATUS}.new {STATUS}"""
    return f"""\
umask 077
if mkdir {MARKER}; then
$(command -v setsid) nohup sh -c {shlex.quote(program)} > /dev/null 2>&1 < /dev/null &
elif [ ! -d {MARKER} ]; then exit 1
fi
left={ceil(ssh.start_watch_s / WATCH_STEP_S)}
while [ $left -gt 0 ] && [ ! -s {STATUS} ]; do sleep {WATCH_STEP_S}; left=$((left - 1)); done
[ ! -s {STATUS} ] || [ "$(cat {STATUS})" = 0 ] && exit 0
tail -n {MAX_LINES} {LOG}
echo "it ended with $(cat {STATUS})"
exit 75"""
