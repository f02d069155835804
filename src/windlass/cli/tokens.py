"""`windlass tokens`: who may call the control plane over HTTP, beside the machines it hires: programs by tokens, people
by links that let a browser in."""

from typing import Annotated, Literal

import typer

from windlass.cli.common import AsJson, ConfigFile, DataDir, command, load
from windlass.cli.output import duration, print_json, print_table
from windlass.model.auth import Role
from windlass.model.errors import BadInput

app = typer.Typer(help="Create and revoke tokens for the HTTP API, and links to the dashboard.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="What the token is called, to revoke it by.", metavar="NAME")]


@app.command()
@command
async def create(
    name: Name,
    role: Annotated[Role, typer.Option(help="What its holder may do.")],
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make a token and print it, this once: only its hash is kept."""
    import secrets

    from windlass.model.auth import API_PREFIX, hash_of, new_token
    from windlass.model.task import is_name
    from windlass.wiring import stores

    if not is_name(name):
        raise BadInput(f"{name!r} cannot be a token's name: use letters, digits and _ . : -, at most 63 of them.")
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
    """List tokens, newest first; the tokens themselves nobody knows."""
    from windlass.wiring import stores

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
            "revoked" if token.revoked_at is not None else "in use",
            duration((now - token.created_at).total_seconds()),
            duration((now - token.last_used_at).total_seconds()) if token.last_used_at else "never",
        )
        for token in found
    ]
    if rows:
        print_table(rows, "token", "role", "state", "age", "used", right=("age", "used"))
    else:
        print("no tokens")


@app.command()
@command
async def link(
    role: Annotated[
        Literal["viewer", "operator"], typer.Option(help="What whoever opens it may do: look, or act too.")
    ] = "operator",
    url: Annotated[
        str | None,
        typer.Option(
            help="Where the dashboard is, if not where `windlass up` has written that it is.",
            metavar="http://HOST:PORT",
        ),
    ] = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Print a link that lets one more browser in, once, within a day."""
    from windlass.wiring.http_server import dashboard_link

    if url is not None and not url.startswith(("http://", "https://")):
        raise BadInput(f"{url!r} is not where a dashboard is: write http://127.0.0.1:8080, or https:// and its name.")
    address = await dashboard_link(load(config, data_dir).config, Role(role), url)
    if as_json:
        print_json({"role": role, "link": address})
    else:
        print(address)


@app.command()
@command
async def sessions(config: ConfigFile = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List browsers that were let in, and links that still let one in; newest first."""
    from windlass.wiring import stores

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
            "link, not used yet" if session.is_link else "browser",
            duration((now - session.created_at).total_seconds()),
            duration((session.expires_at - now).total_seconds()),
        )
        for session in found
    ]
    if rows:
        print_table(rows, "session", "role", "kind", "age", "ends in", right=("age", "ends in"))
    else:
        print("no sessions")


@app.command()
@command
async def revoke(
    name: Annotated[str | None, typer.Argument(help="The token to revoke.", metavar="NAME")] = None,
    session: Annotated[
        str | None, typer.Option(help="A browser's session, or an unused link, instead.", metavar="SESSION")
    ] = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """From now on the token, or the session, opens nothing."""
    from windlass.wiring import stores

    if (name is None) == (session is None):
        raise BadInput("say what to revoke: the NAME of a token, or --session and its id (`windlass tokens sessions`).")
    async with stores.auth_store(load(config, data_dir).config, may_create=False) as store:
        if name is not None and not await store.revoke_token(name):
            raise BadInput(f"there is no token {name} in use: `windlass tokens list` shows all.")
        if session is not None and not await store.revoke_session(session):
            raise BadInput(f"there is no session {session}: `windlass tokens sessions` shows all.")
    if as_json:
        print_json({"revoked": name or session})
    else:
        print(f"revoked {name or session}")
