"""Downloads the wheel of Windlass that the control plane serves, so that a machine runs the same version.

    python3 fetch_wheel.py JOIN_FILE FOLDER
    python3 fetch_wheel.py JOIN_FILE --step TEXT [--output FILE] [--failed]

The first form prints the path of the wheel and exits with 0, or prints an error message and exits with 1. A wheel is in
FOLDER only if its SHA-256 matches. The second form reports a step of the boot and the last lines of FILE, once, and
prints nothing. The join token is sent only to the URL in JOIN_FILE: redirects are refused and proxies ignored. Neither
use uses up the token. After the machine has joined, the worker token in JOIN_FILE.token is used instead.
This file is copied to machines that have only Python, so it uses only the standard library.
"""

import argparse
import hashlib
import http.client
import json
import random
import re
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

# About two minutes with the waits in between: longer than a restart of the control plane.
MAX_ATTEMPTS = 8
FIRST_WAIT_S = 1.0
MAX_WAIT_S = 30.0
# A connection without data for this long times out.
REQUEST_TIMEOUT_S = 30.0
# Limit for one download, however slow.
DOWNLOAD_TIMEOUT_S = 180.0
# Windlass is smaller than one megabyte.
MAX_WHEEL_BYTES = 16 << 20
MAX_ANSWER_BYTES = 64 << 10
STEP_TIMEOUT_S = 10.0
MAX_STEP_CHARACTERS = 100
MAX_OUTPUT_BYTES = 12 << 10
CHUNK_BYTES = 1 << 16
# Temporary errors: the same request may succeed later.
TEMPORARY_CODES = frozenset({408, 425, 429})

# A file name without a path: the control plane does not choose the folder.
WHEEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]*\.whl")
SHA256 = re.compile(r"[0-9a-f]{64}")


class DownloadRefused(Exception):
    """A retry will not help."""


class DownloadFailed(Exception):
    """A retry may help."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """urllib would send the Authorization header to the target of a redirect."""

    def redirect_request(self, *_: Any) -> None:
        return None


class WheelSource:
    def __init__(self, url: str, token: str, ca_file: Path | None = None, ca_pem: str | None = None) -> None:
        # urllib also reads file and FTP URLs.
        if not url.startswith(("https://", "http://")):
            raise DownloadRefused("the control plane's address does not begin with http:// or https://")
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}", "User-Agent": "windlass-bootstrap"}
        tls = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca_file, cadata=ca_pem))
        # No proxy, even if the environment has one: only the control plane may see the token.
        self._opener = urllib.request.build_opener(_NoRedirects, tls, urllib.request.ProxyHandler({}))

    def report_step(self, worker_id: str, step: str, output: str = "", *, has_failed: bool = False) -> None:
        """One attempt: a later step makes up for a lost one, unless it `has_failed`. Raises OSError."""
        text = "".join(c if " " <= c <= "~" else "?" for c in step)[:MAX_STEP_CHARACTERS]
        path = f"/internal/workers/{urllib.parse.quote(worker_id, safe='')}/boot-step"
        headers = {**self._headers, "Content-Type": "application/json"}
        body = json.dumps({"step": text, "output": output, "has_failed": has_failed}, ensure_ascii=False).encode()
        request = urllib.request.Request(self.url + path, body, headers)  # noqa: S310 - checked above
        self._opener.open(request, timeout=STEP_TIMEOUT_S).close()

    def get(self, path: str, max_bytes: int) -> bytes:
        try:
            request = urllib.request.Request(self.url + path, headers=self._headers)  # noqa: S310 - checked above
            with self._opener.open(request, timeout=REQUEST_TIMEOUT_S) as response:
                return _read(response, max_bytes)
        except urllib.error.HTTPError as error:
            problem = f"{self.url}{path} answered {error.code}"
            if error.code >= 500 or error.code in TEMPORARY_CODES:
                raise DownloadFailed(problem) from None
            if error.code in {401, 403, 410}:
                problem += ": the join token is invalid or expired"
            raise DownloadRefused(problem) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise DownloadFailed(f"{self.url}{path} did not answer ({reason})") from None


def _read(response: Any, max_bytes: int) -> bytes:
    until = time.monotonic() + DOWNLOAD_TIMEOUT_S
    content = bytearray()
    while chunk := response.read(CHUNK_BYTES):
        content += chunk
        if len(content) > max_bytes:
            raise DownloadRefused(f"the control plane sent more than {max_bytes:,} bytes")
        if time.monotonic() > until:
            raise DownloadFailed(f"the download took longer than {DOWNLOAD_TIMEOUT_S:g} s")
    return bytes(content)


def fetch_once(control_plane: WheelSource, folder: Path) -> Path:
    """Reads the name and hash each time, because the control plane may have been upgraded in between."""
    try:
        announced = json.loads(control_plane.get("/internal/wheel", MAX_ANSWER_BYTES))
        name, sha256 = announced["filename"], announced["sha256"]
        is_sound = bool(WHEEL_NAME.fullmatch(name) and SHA256.fullmatch(sha256))
    except (ValueError, KeyError, TypeError):
        is_sound = False
    if not is_sound:
        raise DownloadRefused(
            f"{control_plane.url}/internal/wheel did not return a wheel. Check the URL of the control plane."
        )
    content = control_plane.get(f"/internal/wheel/{name}", MAX_WHEEL_BYTES)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DownloadFailed(f"{name} is damaged: its SHA-256 differs from the announced one")
    folder.mkdir(parents=True, exist_ok=True)
    wheel: Path = folder / name
    # Renamed when complete: a wheel in the folder may be installed.
    partial = wheel.with_suffix(".partial")
    partial.write_bytes(content)
    return partial.replace(wheel)


def fetch(control_plane: WheelSource, folder: Path, first_wait_s: float = FIRST_WAIT_S) -> Path:
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            return fetch_once(control_plane, folder)
        except DownloadFailed as error:
            if attempt == MAX_ATTEMPTS:
                raise DownloadRefused(f"{error} ({MAX_ATTEMPTS} attempts)") from None
            _print_error(f"{error}, retrying ({attempt} of {MAX_ATTEMPTS})")
            # Jitter: machines that were created together do not retry together.
            wait_s = min(MAX_WAIT_S, first_wait_s * 2 ** (attempt - 1))
            time.sleep(wait_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads load, hides nothing
    raise AssertionError("the last attempt returns or raises")


def control_plane_of(join_file: Path) -> WheelSource:
    join = json.loads(join_file.read_text(encoding="utf-8"))
    token = join.get("join_token") or join_file.with_name(f"{join_file.name}.token").read_text().strip()
    ca_file = join.get("ca_file")
    return WheelSource(join["url"], token, join_file.parent / ca_file if ca_file else None, join.get("ca_pem"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch the wheel that the control plane serves.")
    parser.add_argument("join_file", type=Path)
    parser.add_argument("folder", type=Path, nargs="?", default=Path())
    parser.add_argument("--step")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--failed", action="store_true")
    parser.add_argument("--first-wait-s", type=float, default=FIRST_WAIT_S)
    arguments = parser.parse_args()
    if arguments.step is not None:
        return _report_step(arguments.join_file, arguments.step, arguments.output, has_failed=arguments.failed)
    try:
        wheel = fetch(control_plane_of(arguments.join_file), arguments.folder, arguments.first_wait_s)
    except DownloadRefused as error:
        _print_error(str(error))
        return 1
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        _print_error(f"cannot use {arguments.join_file}: {type(error).__name__}")
        return 1
    sys.stdout.write(f"{wheel}\n")
    return 0


def _report_step(join_file: Path, step: str, output: Path | None, *, has_failed: bool) -> int:
    try:
        worker_id = json.loads(join_file.read_text(encoding="utf-8"))["worker_id"]
        lines = _last_lines(output) if output is not None else ""
        control_plane_of(join_file).report_step(worker_id, step, lines, has_failed=has_failed)
    except (OSError, ValueError, LookupError, TypeError, DownloadRefused, http.client.HTTPException):
        return 1
    return 0


def _last_lines(path: Path) -> str:
    try:
        text = path.read_bytes()[-MAX_OUTPUT_BYTES:].decode(errors="replace")
    except OSError:
        return ""
    return "".join(c for c in text if c == "\n" or c.isprintable())


def _print_error(message: str) -> None:
    sys.stderr.write(f"windlass: {message}\n")


if __name__ == "__main__":
    sys.exit(main())
