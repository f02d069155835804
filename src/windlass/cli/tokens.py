"""`windlass tokens`: API tokens for programs, and dashboard links and sessions for browsers."""

import secrets
from typing import Annotated, Literal

import typer

from windlass.cli.options import AsJson, ConfigFile, DataDir, command, load
from windlass.cli.output import duration, print_json, print_table
from windlass.model.auth import API_PREFIX, Role, hash_of, new_token
from windlass.model.errors import BadInput
from windlass.model.task import is_name
from windlass.wiring import stores
from windlass.wiring.http_server import dashboard_link

app = typer.Typer(help="Create and revoke API tokens and dashboard links.", no_args_is_help=True)


@app.command()
@command
async def create(
    name: Annotated[str, typer.Argument(help="Name of the token, needed to revoke it.", metavar="NAME")],
    role: Annotated[Role, typer.Option(help="What the token allows.")],
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Create a token and print it. It is shown only once: the database stores its hash."""
    if not is_name(name):
        raise BadInput(f"invalid token name {name!r}: use at most 63 letters, digits and _ . : -.")
    token = new_token(API_PREFIX, secrets.SystemRandom())
    async with stores.auth_store(load(config, data_dir).config) as store:
        created = await store.create_token(name, role, hash_of(token))
    if as_json:
        print_json({"name": created.name, "role": created.role, "token": token})
    else:
        print(token)


@app.command("list")
@command
async def list_(config: ConfigFile = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List tokens, newest first, by name and role."""
    async with stores.auth_store(load(config, data_dir).config, may_create=False) as store:
        found = await store.tokens()
        now = await store.now()
    if as_json:
        print_json(found)
        return
    rows = [
        (
            token.name,
            token.role,
            "revoked" if token.revoked_at is not None else "active",
            duration((now - token.created_at).total_seconds()),
            duration((now - token.last_used_at).total_seconds()) if token.last_used_at else "never",
        )
        for token in found
    ]
    if rows:
        print_table(rows, "token", "role", "status", "age", "last used", right=("age", "last used"))
    else:
        print("no tokens")


@app.command()
@command
async def link(
    role: Annotated[
        Literal["viewer", "operator"],
        typer.Option(help="What the browser session allows: viewer reads, operator also changes."),
    ] = "operator",
    url: Annotated[
        str | None,
        typer.Option(
            help="URL of the dashboard (default: the one that `windlass up` recorded).",
            metavar="http://HOST:PORT",
        ),
    ] = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Print a link that opens the dashboard in one browser. It works once, within a day."""
    if url is not None and not url.startswith(("http://", "https://")):
        raise BadInput(f"{url!r} is not the URL of a dashboard: write http://127.0.0.1:8080 or https://HOST.")
    address = await dashboard_link(load(config, data_dir).config, Role(role), url)
    if as_json:
        print_json({"role": role, "link": address})
    else:
        print(address)


@app.command()
@command
async def sessions(config: ConfigFile = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List browser sessions and unused dashboard links, newest first."""
    async with stores.auth_store(load(config, data_dir).config, may_create=False) as store:
        found = await store.sessions()
        now = await store.now()
    if as_json:
        print_json(found)
        return
    rows = [
        (
            session.id,
            session.role,
            "unused link" if session.is_link else "browser",
            duration((now - session.created_at).total_seconds()),
            duration((session.expires_at - now).total_seconds()),
        )
        for session in found
    ]
    if rows:
        print_table(rows, "session", "role", "kind", "age", "expires in", right=("age", "expires in"))
    else:
        print("no sessions")


@app.command()
@command
async def revoke(
    name: Annotated[str | None, typer.Argument(help="Name of the token to revoke.", metavar="NAME")] = None,
    session: Annotated[
        str | None, typer.Option(help="Revoke this browser session or unused link instead.", metavar="SESSION")
    ] = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a token, a browser session or an unused link, at once."""
    if (name is None) == (session is None):
        raise BadInput("choose what to revoke: the NAME of a token, or --session ID (see `windlass tokens sessions`).")
    async with stores.auth_store(load(config, data_dir).config, may_create=False) as store:
        if name is not None and not await store.revoke_token(name):
            raise BadInput(f"active token {name} not found. `windlass tokens list` shows all tokens.")
        if session is not None and not await store.revoke_session(session):
            raise BadInput(f"session {session} not found. `windlass tokens sessions` shows all sessions.")
    if as_json:
        print_json({"revoked": name or session})
    else:
        print(f"revoked {name or session}")
