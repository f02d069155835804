"""Turns a running pod into a worker: check the pod over SSH, then start its worker once.

Each step that can fail has its own code: SSH_UNREACHABLE, SSH_HOST_KEY_CHANGED, STORAGE_NOT_MOUNTED, GPU_NOT_DETECTED,
DISK_FULL, JOIN_DATA_MISSING, JOIN_DATA_INVALID, those of the installation (installation.py), DEPENDENCY_MISSING,
START_SCRIPT_FAILED; MACHINE_GONE ends the attempt at once. While the API does not report the pod's address, the last
known one is tried. A failure there proves nothing, so it never fails the pod.

The worker is started once, however often this runs: creating a directory on the pod's disk is atomic, and the shell
that creates it starts the worker. A broken connection or a crash of the orchestrator does not interrupt that. If the
directory was created and nothing started (a full disk at that moment), the worker never joins and is replaced.
"""

import asyncio
import random
import shlex
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from math import ceil

from windlass.model.errors import NotPrepared, Throttled, Unavailable
from windlass.model.machine import Preparation
from windlass.model.redaction import Mask, mask_of
from windlass.model.runpod import JOIN_FILE, RunpodSettings
from windlass.ports.provider import OnHostKey
from windlass.providers.runpod.installation import ENVIRONMENT_FOLDER, PodInstallation, failure_of
from windlass.providers.runpod.ssh import CommandResult, Endpoint, HostKeyChanged, OpenShell, Shell, Unreachable
from windlass.providers.vendor_error import VendorError

# Pause between attempts to connect: a pod's sshd starts some seconds after the pod.
RETRY_S = 5.0
# How much of a command's output goes into the event.
MAX_LINES = 20
MAX_CHARACTERS = 2000
FOLDER = "/etc/windlass"
MARKER = f"{FOLDER}/launch"
STATUS = f"{MARKER}/status"
LOG = f"{FOLDER}/worker.log"
# A longer log is moved to a second file and emptied. Each of the two files has at most this size plus what is printed
# within LOG_CHECK_S.
MAX_LOG_BYTES = 4 * 1024 * 1024
LOG_CHECK_S = 5.0
# A login shell does not have the container's environment. The first process has it, each variable ended by NUL.
FIRST_PROCESS = "/proc/1/environ"
# The start script of Runpod's images writes it to this file: `export NAME="value"`, in which nothing is escaped. Older
# images write only Runpod's own variables, newer ones no variable in lower case and of each value only the first line.
ENVIRONMENT_FILE = "/etc/rp_environment"
WATCH_INTERVAL_S = 0.2
# Exit status of the launch if the worker failed. Its log and its own status are in the output.
LAUNCH_FAILED = 75
_EXIT_STATUSES = {
    "exit status 126": ": a program of start_command may not be executed",
    "exit status 127": ": a program or script of start_command is missing on the pod",
}
SSH_UNREACHABLE = "SSH_UNREACHABLE"
_KB_PER_GB = 1_000_000 / 1.024
# The pod's current SSH address; None while it has none. Raises VendorError, Throttled, or NotPrepared if it never will.
FindEndpoint = Callable[[], Awaitable[Endpoint | None]]


@dataclass(frozen=True, slots=True)
class Check:
    code: str
    # The condition, as in "the storage is mounted".
    condition: str
    command: str
    # The problem that the output shows, if any. Applies if the command succeeded.
    find_problem: Callable[[str], str | None] = lambda _: None


class Preparer:
    """`mask` redacts secrets from command output, which goes into events and reasons. Without an `installation`, pods
    must bring everything that the start command needs."""

    def __init__(
        self,
        settings: RunpodSettings,
        open_shell: OpenShell,
        rng: random.Random | None = None,
        retry_s: float = RETRY_S,
        mask: Mask = Mask(),  # noqa: B008 - a value
        installation: PodInstallation | None = None,
    ) -> None:
        self._settings = settings
        self._installation = installation
        self._open_shell = open_shell
        self._rng = rng or random.Random()  # noqa: S311
        self._retry_s = retry_s
        # pip prints addresses of indexes, and an index may repeat credentials in its answers.
        self._mask = mask | mask_of(installation.secrets if installation is not None else ())

    async def prepare(
        self,
        pod: str,
        find_endpoint: FindEndpoint,
        host_key: str | None,
        on_host_key: OnHostKey,
        last_known: Endpoint | None = None,
    ) -> Preparation:
        """Raises NotPrepared, or Unavailable if the API gave too little information to blame the pod. `pod` is its name
        in messages. `last_known` is its last SSH address."""
        attempt = _ProvisioningAttempt(pod, host_key, on_host_key, last_known, self._mask)
        try:
            async with asyncio.timeout(self._settings.ssh.timeout_s) as attempt.timeout:
                while not await self._try_once(attempt, find_endpoint):  # noqa: ASYNC110 - it polls the pod
                    await asyncio.sleep(self._retry_s * (0.5 + self._rng.random()))
        except TimeoutError:
            reason = f"not done within {self._settings.ssh.timeout_s + attempt.extra_s:g} s ({attempt.last})"
            if attempt.had_api_error and attempt.code == SSH_UNREACHABLE:
                raise Unavailable(f"preparing {pod}: {reason}; the API did not always report its address") from None
            raise attempt.failure(reason) from None
        return Preparation(attempt.host_key)

    async def _try_once(self, attempt: "_ProvisioningAttempt", find_endpoint: FindEndpoint) -> bool:
        """Whether the worker was started. False: retry."""
        attempt.code = SSH_UNREACHABLE
        is_address_uncertain = False
        try:
            # Each time, since the port may change.
            endpoint = attempt.last_known = await find_endpoint()
            if endpoint is None:
                attempt.last = "no public SSH port yet"
        except (VendorError, Throttled) as error:
            is_address_uncertain = attempt.had_api_error = True
            endpoint, attempt.last = attempt.last_known, str(error)
        if endpoint is None:
            return False
        try:
            async with self._open_shell(endpoint, attempt.host_key) as shell:
                await attempt.record_host_key(shell.host_key)
                await self._check_and_start(attempt, shell)
        except HostKeyChanged as error:
            if is_address_uncertain:
                # The port may belong to another pod by now.
                attempt.last = str(error)
                return False
            attempt.code = "SSH_HOST_KEY_CHANGED"
            raise attempt.failure(str(error)) from error
        except Unreachable as error:
            attempt.last = str(error)
            return False
        return True

    async def _check_and_start(self, attempt: "_ProvisioningAttempt", shell: Shell) -> None:
        limit_s = self._settings.ssh.command_timeout_s
        for check in machine_checks(self._settings):
            await self._check(attempt, shell, check)
        if self._installation is not None:
            await self._install(attempt, shell, self._installation)
        for check in dependency_checks(self._settings):
            await self._check(attempt, shell, check)
        attempt.code, attempt.last = "START_SCRIPT_FAILED", "starting the worker"
        result = await shell.run(launch_script(self._settings), limit_s + self._settings.ssh.start_watch_s)
        if result.status != 0:
            problem = describe_start_failure(result, limit_s, self._mask)
            raise attempt.failure(f"the worker did not start: {problem}", result.output)

    async def _check(self, attempt: "_ProvisioningAttempt", shell: Shell, check: Check) -> None:
        limit_s = self._settings.ssh.command_timeout_s
        attempt.code, attempt.last = check.code, f"checking that {check.condition}"
        result = await shell.run(check.command, limit_s)
        is_success = result.status == 0
        problem = check.find_problem(result.output) if is_success else describe_failure(result, limit_s, self._mask)
        if problem is not None:
            raise attempt.failure(f"check failed: {check.condition}: {problem}", result.output)

    async def _install(self, attempt: "_ProvisioningAttempt", shell: Shell, installation: PodInstallation) -> None:
        limit_s = self._settings.ssh.install_timeout_s
        attempt.code, attempt.last = "INSTALL_FAILED", "installing windlass"
        attempt.extend(limit_s)
        command = installation.command(JOIN_FILE, limit_s)
        result = await shell.run(f"{_LOAD_ENVIRONMENT}\nunset WINDLASS_JOIN\n{command}", limit_s)
        if result.status != 0:
            attempt.code, problem = failure_of(describe_failure(result, limit_s, self._mask))
            raise attempt.failure(f"windlass was not installed: {problem}", result.output)


@dataclass(slots=True)
class _ProvisioningAttempt:
    """The progress of one attempt. `code` and `last` describe the step that is running."""

    pod: str
    host_key: str | None
    on_host_key: OnHostKey
    last_known: Endpoint | None
    mask: Mask
    code: str = SSH_UNREACHABLE
    last: str = "not tried"
    # Whether the API failed to report the pod's address at least once.
    had_api_error: bool = False
    timeout: asyncio.Timeout | None = None
    # By how much the timeout was extended.
    extra_s: float = 0.0

    def extend(self, extra_s: float) -> None:
        """Once, however often a connection breaks."""
        deadline = self.timeout.when() if self.timeout is not None else None
        if self.timeout is not None and deadline is not None and not self.extra_s:
            self.timeout.reschedule(deadline + extra_s)
            self.extra_s = extra_s

    async def record_host_key(self, host_key: str) -> None:
        """Stored before anything else happens: after a crash, the next attempt must accept only this key."""
        if self.host_key is None:
            await self.on_host_key(host_key)
            self.host_key = host_key

    def failure(self, reason: str, output: str = "") -> NotPrepared:
        message = self.mask(f"preparing {self.pod}: {reason}")
        return NotPrepared(self.code, message, last_lines(output, self.mask), self.host_key)


def describe_failure(result: CommandResult, limit_s: float, mask: Mask) -> str:
    if result.status is None:
        return f"no response within {limit_s:g} s"
    lines = last_lines(result.output, mask).splitlines()
    return lines[-1] if lines else f"exit status {result.status}"


def describe_start_failure(result: CommandResult, limit_s: float, mask: Mask) -> str:
    """The worker's last line, which names what is missing, and its exit status."""
    lines = last_lines(result.output, mask).splitlines()
    if result.status != LAUNCH_FAILED or len(lines) < 2:
        return describe_failure(result, limit_s, mask)
    meaning = _EXIT_STATUSES.get(lines[-1], "")
    return f"{lines[-2]} ({lines[-1]}{meaning})"


def last_lines(output: str, mask: Mask) -> str:
    # Mask before cutting: part of a secret would not be recognised.
    lines = [line.rstrip() for line in mask(output).splitlines() if line.strip()]
    return "\n".join(lines[-MAX_LINES:])[-MAX_CHARACTERS:]


# ------------------------------------------------------------------------------------------------------------ checks


def machine_checks(settings: RunpodSettings) -> Iterator[Check]:
    """What the pod must have before anything is installed, in the order in which it is checked."""
    path, ssh = settings.storage_path, settings.ssh
    if path is not None:
        is_mounted = f"( mountpoint {path} || grep ' {path} ' /proc/mounts )"
        is_writable = f"{{ test -w {path} || {{ echo {path} is not writable; exit 1; }}; }}"
        yield Check("STORAGE_NOT_MOUNTED", f"{path} is mounted and writable", f"{is_mounted} && {is_writable}")
    query = "nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits"
    yield Check("GPU_NOT_DETECTED", "the GPU responds", query, lambda output: missing_gpus(output, settings.gpu_count))
    if ssh.min_free_disk_gb > 0:
        condition = f"{ssh.min_free_disk_gb:g} GB of disk are free"
        yield Check("DISK_FULL", condition, "df -P -k /", lambda output: missing_disk(output, ssh.min_free_disk_gb))
    yield Check("JOIN_DATA_MISSING", "the join file can be written", WRITE_JOIN_FILE)
    yield Check("JOIN_DATA_INVALID", "the join file is JSON", CHECK_JOIN_FILE)


def dependency_checks(settings: RunpodSettings) -> Iterator[Check]:
    """What the handler needs, in the environment in which it will run."""
    for command in settings.ssh.checks:
        yield Check("DEPENDENCY_MISSING", f"`{command}` succeeds", f"{_USE_ENVIRONMENT}\n{command}")


def missing_gpus(output: str, wanted: int) -> str | None:
    sizes = [line.rpartition(",")[2].strip() for line in output.splitlines() if "," in line]
    found = sum(size.isdecimal() and int(size) > 0 for size in sizes)
    return None if found >= wanted else f"{found} of {wanted} GPUs have memory"


def missing_disk(output: str, wanted_gb: float) -> str | None:
    lines = [line.split() for line in output.splitlines() if line.strip()]
    free = lines[-1][3] if lines and len(lines[-1]) > 3 else ""
    if not free.isdecimal():
        return "unreadable output of df"
    free_gb = int(free) / _KB_PER_GB
    return None if free_gb >= wanted_gb else f"only {free_gb:.1f} GB"


# ------------------------------------------------------------------------------------------------------------ starting

# Nothing of the file is run, since a value may contain any character: a shell would drop the quotes of WINDLASS_JOIN
# and run what is in backquotes. Where both have a variable, the first process counts; only its own user may read it.
# Line breaks in values are carried as the character 1. Variables of this shell, some of them read-only, are kept.
_LOAD_ENVIRONMENT = f"""\
windlass_break=$(printf '\\001')
windlass_entries=$(
sed -n 's/^export \\([A-Za-z_][A-Za-z0-9_]*\\)="\\(.*\\)"$/\\1=\\2/p' {ENVIRONMENT_FILE} 2>/dev/null
cat {FIRST_PROCESS} 2>/dev/null | tr '\\000\\n' '\\n\\001'
)
while IFS= read -r windlass_entry; do
case $windlass_entry in *=*) ;; *) continue ;; esac
case ${{windlass_entry%%=*}} in
''|[0-9]*|*[!A-Za-z0-9_]*|_|PWD|OLDPWD|SHLVL|IFS|UID|EUID|PPID|BASHOPTS|SHELLOPTS) continue ;;
esac
case $windlass_entry in *"$windlass_break"*)
windlass_entry=$(printf '%s.' "$windlass_entry" | tr '\\001' '\\n')
windlass_entry=${{windlass_entry%.}}
esac
export "$windlass_entry"
done <<ENTRIES
$windlass_entries
ENTRIES
unset windlass_entries windlass_entry windlass_break"""
# The installed environment comes first in PATH. An image that brings Windlass has none.
_USE_ENVIRONMENT = (
    f"if [ -x {ENVIRONMENT_FOLDER}/bin/windlass ]; then PATH={ENVIRONMENT_FOLDER}/bin:$PATH; export PATH; fi"
)
# For images that do not write the file themselves. Two orchestrators may do it at once.
WRITE_JOIN_FILE = f"""\
umask 077
mkdir -p {FOLDER} || exit 1
[ -s {JOIN_FILE} ] && exit 0
{_LOAD_ENVIRONMENT}
[ -n "$WINDLASS_JOIN" ] || {{ echo "WINDLASS_JOIN is not in the container's environment"; exit 1; }}
printf %s "$WINDLASS_JOIN" > {JOIN_FILE}.$$ && mv {JOIN_FILE}.$$ {JOIN_FILE}"""
# A join file that lost its quotes would only be noticed by the worker. The text is not printed, since it has the token.
CHECK_JOIN_FILE = f"""\
tr '\\n' ' ' < {JOIN_FILE} | grep -Eq '^ *\\{{.*"worker_id" *: *".*\\}} *$' && exit 0
echo "{JOIN_FILE} is not JSON with a worker_id: the image altered WINDLASS_JOIN"
exit 1"""


def launch_script(settings: RunpodSettings) -> str:
    """Starts the worker unless it was started before, and watches it briefly. Exits with 0 if the worker was started,
    now or before, and has not failed since."""
    ssh = settings.ssh
    cd = f"cd {settings.storage_path}" if settings.storage_path is not None else 'cd "$HOME"'
    program = f"""\
{_LOAD_ENVIRONMENT}
{_USE_ENVIRONMENT}
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
left={ceil(ssh.start_watch_s / WATCH_INTERVAL_S)}
while [ $left -gt 0 ] && [ ! -s {STATUS} ]; do sleep {WATCH_INTERVAL_S}; left=$((left - 1)); done
[ ! -s {STATUS} ] || [ "$(cat {STATUS})" = 0 ] && exit 0
tail -n {MAX_LINES} {LOG}
echo "exit status $(cat {STATUS})"
exit {LAUNCH_FAILED}"""
