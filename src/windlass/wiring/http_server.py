"""What HTTP server processes and the commands about them have in common: addresses, stores, samples.

A server uses database connections of its own, so that no number of requests delays a cycle. Workers and users have
separate connections, so that a crowd of readers never delays a worker. While a server runs, its address is recorded in
the database, for `windlass tokens link`.
"""

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import structlog

from windlass.model.auth import Role
from windlass.model.config import ApiConfig, Config, Retention
from windlass.model.errors import BadInput, ConfigError, WindlassError
from windlass.model.urls import LOOPBACK
from windlass.store.database import Database
from windlass.store.overview import SAMPLE_INTERVAL_S
from windlass.wiring.store_roles import AccessStores, DashboardStores, WorkerProtocolStores
from windlass.wiring.stores import auth_store

# Modules of the server import FastAPI and uvicorn, which commands without a server must not load.
if TYPE_CHECKING:
    from windlass.server.event_stream import OverviewFeed
    from windlass.server.oidc import OidcClient
    from windlass.server.tls import ReloadingTls

WORKER_CONNECTIONS = 8
USER_CONNECTIONS = 6
# Longer queries of users are cancelled.
USER_STATEMENT_TIMEOUT_S = 5.0
# Retention of links, sessions and addresses is applied with every 60th sample: once in five minutes.
SAMPLES_PER_PURGE = 60
# Gets the address of the dashboard, and a function that creates a login link; None if `api.login_link` is off.
OnDashboard = Callable[[str, Callable[[], Awaitable[str]] | None], Awaitable[None]]
log = structlog.get_logger(__name__)


def open_listener(config: Config) -> socket.socket | None:
    """Bind the configured port, and raise the file limit for its connections. Raises BadInput."""
    if config.api.port is None:
        return None
    if config.api.host not in LOOPBACK and config.api.tls_cert is None and not config.api.plain_http:
        raise BadInput(
            f"api.host is {config.api.host} without TLS, which would send tokens unencrypted: set api.tls_cert and "
            "api.tls_key, or api.plain_http = true if a proxy or the network encrypts."
        )
    # Before any process starts: an unusable certificate or a missing package would end each of them.
    load_tls(config.api)
    make_oidc_client(config, "")
    from windlass.server.connections import raise_file_limit
    from windlass.server.server import listen

    raise_file_limit()
    return listen(config.api.host, config.api.port)


@asynccontextmanager
async def server_stores(
    dsn: str, retention: Retention | None = None, virtual_now: Callable[[], datetime] | None = None
) -> AsyncIterator[tuple[WorkerProtocolStores, DashboardStores]]:
    """The store of workers and the store of users."""
    async with (
        Database(
            dsn, retention=retention, max_connections=WORKER_CONNECTIONS, virtual_now=virtual_now
        ) as worker_database,
        Database(
            dsn,
            retention=retention,
            max_connections=USER_CONNECTIONS,
            statement_timeout_s=USER_STATEMENT_TIMEOUT_S,
            virtual_now=virtual_now,
        ) as user_database,
    ):
        yield WorkerProtocolStores(worker_database), DashboardStores(user_database)


def make_oidc_client(config: Config, url: str) -> "OidcClient | None":
    """`url`: of the dashboard. Raises ConfigError if the extra is missing."""
    if config.oidc.issuer is None:
        return None
    from windlass.server.oidc import OidcClient
    from windlass.server.routes.login import OIDC_CALLBACK

    try:
        from windlass.server.id_token import verify_id_token
    except ModuleNotFoundError:
        raise ConfigError("oidc.issuer is set, which needs the extra: pip install 'windlass[oidc]'.") from None
    return OidcClient(config.oidc, f"{url.rstrip('/')}{OIDC_CALLBACK}", verify_id_token)


def load_tls(api: ApiConfig) -> "ReloadingTls | None":
    """Raises ConfigError if the certificate or key cannot be used."""
    if api.tls_cert is None or api.tls_key is None:
        return None
    from windlass.server.tls import ReloadingTls, TlsFiles

    return ReloadingTls(TlsFiles(api.tls_cert.expanduser(), api.tls_key.expanduser()))


def is_open_to_localhost(api: ApiConfig) -> bool:
    """Whether requests from this host may read without a token. With `api.url`, a proxy on this host is likely."""
    return api.open_reading and api.host in LOOPBACK and api.url is None


def warn_of_open_reading(api: ApiConfig) -> None:
    """Warn: the server cannot notice a proxy on this host that adds no header."""
    if is_open_to_localhost(api):
        hint = "a proxy on this host without forwarding headers opens reading to its callers: set api.url behind one"
        log.warning("answer reads without login", host=api.host, hint=hint)


async def dashboard_link(config: Config, role: Role, url: str | None, name: str) -> str:
    """A login link for one browser. `url`: where the dashboard is, if it is not to be looked up. `name`: the person."""
    from windlass.server.routes.login import create_login_link

    async with auth_store(config, may_create=False) as store:
        base_url = url or config.api.url or await _recorded_url(store)
        if base_url is None:
            if not config.api.port:
                raise BadInput(
                    "no running `windlass up --port` was found: start one, or give --url http://127.0.0.1:8080, or set "
                    "api.port or api.url."
                )
            base_url = browser_url(config, config.api.port)
        return await create_login_link(store, base_url.rstrip("/"), role, name)


async def _recorded_url(store: AccessStores) -> str | None:
    """Address of a running server that is reachable from this host. BadInput if all are on other hosts."""
    servers = [(process.url, process.host) for process in await store.processes() if process.url is not None]
    for url, host in servers:
        if host == socket.gethostname() or urlsplit(url).hostname not in LOOPBACK:
            return url
    if servers:
        url, host = servers[0]
        raise BadInput(
            f"the dashboard runs at {url} on host {host}: create the link there, or give --url "
            "with an address that reaches it."
        )
    return None


def browser_url(config: Config, port: int) -> str:
    if config.api.url is not None:
        return config.api.url
    host, scheme = config.api.host, config.api.scheme
    if host in ("0.0.0.0", "::", *LOOPBACK):  # noqa: S104
        host = "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def take_samples(store: DashboardStores, overview_feed: "OverviewFeed") -> None:
    """Record samples for charts every few seconds, and purge links, sessions and addresses now and then."""
    for number in itertools.count():
        try:
            await store.take_samples(await overview_feed.overview())
            if number % SAMPLES_PER_PURGE == 0:
                await store.purge_dashboard_rows()
        except WindlassError as error:
            log.warning("take sample failed", error=str(error))
        except Exception:
            # A defect. Without this loop the charts would end.
            log.exception("take sample failed")
        await asyncio.sleep(SAMPLE_INTERVAL_S)
