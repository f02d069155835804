"""Serves a wheel as a control plane does, on loopback, and makes tiny wheels."""

import base64
import contextlib
import hashlib
import io
import json
import ssl
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def tiny_wheel(package: str, version: str) -> bytes:
    """A package without dependencies whose program prints its version."""
    info = f"{package}-{version}.dist-info"
    contents = {
        f"{package}.py": f"def main():\n    print('{package} {version}')\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{package} = {package}:main\n",
    }
    record = ""
    for name, text in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(text)}\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in {**contents, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(name, text)
    return buffer.getvalue()


class WheelServer:
    """A control plane that serves only `/internal/wheel`, with scripted faults."""

    def __init__(self, wheel: bytes, token: str, filename: str) -> None:
        self.wheel, self._token, self._filename = wheel, token, filename
        self.announcement: Any = {"filename": filename, "sha256": hashlib.sha256(wheel).hexdigest()}
        self.failures: list[int] = []  # codes answered before anything else, in order
        self.redirect_to: str | None = None
        self.cuts_downloads = 0
        self.requests: list[tuple[str, str | None]] = []
        self.steps: list[tuple[str, str | None, dict[str, str]]] = []
        self.url = ""

    def replace(self, wheel: bytes) -> None:
        """Serve something else, announced as it is."""
        self.wheel = wheel
        self.announcement = {**self.announcement, "sha256": hashlib.sha256(wheel).hexdigest()}

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.requests.append((request.path, request.headers.get("Authorization")))
        if self.redirect_to is not None:
            request.send_response(302)
            request.send_header("Location", self.redirect_to + request.path)
            request.end_headers()
        elif self.failures:
            request.send_error(self.failures.pop(0))
        elif request.headers.get("Authorization") != f"Bearer {self._token}":
            request.send_error(401)
        elif request.path == "/internal/wheel":
            self._send(request, json.dumps(self.announcement).encode())
        elif request.path == f"/internal/wheel/{self._filename}":
            self._send(request, self.wheel)
        else:
            request.send_error(404)

    def _send(self, request: BaseHTTPRequestHandler, content: bytes) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if request.path.endswith(".whl") and self.cuts_downloads > 0:
            self.cuts_downloads -= 1
            content = content[: len(content) // 2]
        request.wfile.write(content)


@contextlib.contextmanager
def serving_wheel(
    wheel: bytes, token: str, filename: str, certificate: tuple[Path, Path] | None = None
) -> Iterator[WheelServer]:
    control_plane = WheelServer(wheel, token, filename)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            control_plane.answer(self)

        def do_POST(self) -> None:
            """A step of a boot with its output. No machine depends on the answer."""
            content = self.rfile.read(int(self.headers["Content-Length"]))
            control_plane.steps.append((self.path, self.headers.get("Authorization"), json.loads(content)))
            self.send_error(501)

        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        control_plane.url = f"{'http' if certificate is None else 'https'}://127.0.0.1:{server.server_port}"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            # The handshake runs in the thread of its request, so that a failure does not end the server.
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield control_plane
        finally:
            server.shutdown()
            thread.join()
