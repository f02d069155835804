"""`windlass tokens`: API tokens for programs, and dashboard links and sessions for browsers."""

from typing import Annotated, Literal

import typer

from windlass import access
from windlass.cli.options import AsJson, ConfigFile, DataDir, load, os_user, person_command
from windlass.cli.output import print_json, print_table
from windlass.cli.times import parse_duration
from windlass.model.auth import DEFAULT_TOKEN_TTL_S, MAX_PERSON_CHARACTERS, NewToken, Role, TokenScope
from windlass.model.errors import BadInput
from windlass.model.text_format import duration
from windlass.wiring import stores
from windlass.wiring.http_server import dashboard_link

app = typer.Typer(help="Create and revoke API tokens and dashboard links.", no_args_is_help=True)


@app.command()
@person_command
async def create(
    name: Annotated[str, typer.Argument(help="Name of the token, needed to revoke it.", metavar="NAME")],
    role: Annotated[Role, typer.Option(help="What the token allows.")],
    queue: Annotated[
        list[str] | None,
        typer.Option("--queue", "-q", help="Limit it to this queue. Repeat it for several.", metavar="NAME"),
    ] = None,
    fleet: Annotated[
        list[str] | None,
        typer.Option("--fleet", "-f", help="Limit it to this fleet. Repeat it for several.", metavar="NAME"),
    ] = None,
    expires: Annotated[
        str, typer.Option(help="Time until it expires: 12h, 30d, or never.", metavar="DURATION")
    ] = f"{DEFAULT_TOKEN_TTL_S / 86_400:.0f}d",
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Create a token and print it. It is shown only once: the database stores its hash.

    With --queue or --fleet the token reaches these queues and fleets only.
    """
    ttl_s = parse_duration(expires, "--expires") if expires != "never" else None
    scope = TokenScope(frozenset(queue or ()), frozenset(fleet or ()))
    wanted = NewToken(name=name, role=role, scope=scope, ttl_s=ttl_s)
    async with stores.auth_store(load(config, data_dir).config) as store:
        created = await access.create_token(store, wanted)
    if as_json:
        details = created.details
        print_json(
            {"name": details.name, "role": details.role, "expires_at": details.expires_at, "token": created.token}
        )
    else:
        print(created.token)


@app.command("list")
@person_command
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
            token.scope,
            token.status(now),
            duration((now - token.created_at).total_seconds()),
            duration(max(0.0, (token.expires_at - now).total_seconds())) if token.expires_at else "never",
            duration((now - token.last_used_at).total_seconds()) if token.last_used_at else "never",
            token.created_by or "",
        )
        for token in found
    ]
    if rows:
        headings = ("token", "role", "scope", "status", "age", "expires in", "last used", "created by")
        print_table(rows, *headings, right=("age", "expires in", "last used"))
    else:
        print("no tokens")


@app.command()
@person_command
async def link(
    role: Annotated[
        Literal["viewer", "operator", "admin"],
        typer.Option(help="What the session allows: viewer reads, operator also changes, admin also manages tokens."),
    ] = "operator",
    name: Annotated[
        str | None,
        typer.Option(help="The person the link is for, named in the audit list (default: you).", metavar="NAME"),
    ] = None,
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
    person = name.strip() if name is not None else os_user()
    if not (0 < len(person) <= MAX_PERSON_CHARACTERS and person.isprintable()):
        raise BadInput(f"--name must have 1 to {MAX_PERSON_CHARACTERS} printable characters.")
    address = await dashboard_link(load(config, data_dir).config, Role(role), url, person)
    if as_json:
        print_json({"role": role, "link": address})
    else:
        print(address)


@app.command()
@person_command
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
            session.name,
            session.role,
            "unused link" if session.is_link else "browser",
            duration((now - session.created_at).total_seconds()),
            duration((session.expires_at - now).total_seconds()),
        )
        for session in found
    ]
    if rows:
        print_table(rows, "session", "person", "role", "kind", "age", "expires in", right=("age", "expires in"))
    else:
        print("no sessions")


@app.command()
@person_command
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
        if name is not None:
            result, listed_by = await access.revoke_token(store, name), "list"
        else:
            result, listed_by = await access.revoke_session(store, session or ""), "sessions"
    if result.is_refused:
        raise BadInput(f"{result.message}. `windlass tokens {listed_by}` shows all of them.")
    if as_json:
        print_json({"revoked": name or session})
    else:
        print(result.message)
