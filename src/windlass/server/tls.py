"""TLS of the HTTP server: loads the certificate and its key, and loads them again when the files change.

New connections use a renewed certificate within CHECK_INTERVAL_S, without a restart; open connections keep theirs. If
the new files cannot be used (half written, or a key that does not match), the old certificate stays in use and the
error is logged once per change. The context changes on the event loop only, so never during a handshake.
"""

import asyncio
import ssl
from dataclasses import dataclass
from pathlib import Path

import structlog

from windlass.model.errors import ConfigError

# Certificates are renewed weeks before they expire, so this need not be short.
CHECK_INTERVAL_S = 10.0
log = structlog.get_logger(__name__)
# Inode, time of the last write and size of each file.
FilesVersion = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    certificate: Path
    key: Path

    def version(self) -> FilesVersion:
        """Changes when a file is written or replaced. Raises OSError."""
        found = [path.stat() for path in (self.certificate, self.key)]
        return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in found)

    def load_into(self, context: ssl.SSLContext) -> None:
        """Raises OSError, which ssl.SSLError is."""
        context.load_cert_chain(self.certificate, self.key, password=_no_password)


class ReloadingTls:
    """The server's TLS context. `watch` keeps its certificate current."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises ConfigError if the files cannot be used."""
        self._files = files
        # The version of the files, if they could be read, and the reason.
        self._logged_failure: tuple[FilesVersion | None, str] | None = None
        try:
            self._version = files.version()
            self.context = _new_context()
            files.load_into(self.context)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot use the certificate {files.certificate} with the key {files.key}: {_reason(error)}. "
                "Check api.tls_cert and api.tls_key."
            ) from None

    async def watch(self) -> None:
        """Check for a new certificate until cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await self.reload_if_changed()

    async def reload_if_changed(self) -> bool:
        """Whether a new certificate is in use now."""
        version: FilesVersion | None = None
        try:
            version = await asyncio.to_thread(self._files.version)
            if version == self._version:
                return False
            # On a context of its own first: a failure half-way would leave a certificate without its key.
            await asyncio.to_thread(self._files.load_into, _new_context())
            # On the event loop: a handshake in between would read a context that is being changed.
            self._files.load_into(self.context)
        except (OSError, ValueError) as error:
            # Tried again at each check, because new permissions do not change the version.
            failure = version, _reason(error)
            if failure != self._logged_failure:
                log.warning("reload certificate failed", certificate=str(self._files.certificate), error=failure[1])
                self._logged_failure = failure
            return False
        self._version, self._logged_failure = version, None
        log.info("reloaded certificate", certificate=str(self._files.certificate))
        return True


def _new_context() -> ssl.SSLContext:
    """Python's default for servers: TLS 1.2 or newer."""
    return ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)


def _no_password() -> str:
    """OpenSSL would ask for it on the terminal."""
    raise ValueError("the key is encrypted; use one without a password")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not a PEM certificate with its key").replace("_", " ").lower()
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)
