"""`windlass tokens`: who may call the control plane over HTTP, beside the machines it hires."""

from typing import Annotated

import typer

from windlass.cli.common import AsJson, ConfigFile, DataDir, command, load
from windlass.cli.output import duration, print_json, print_table
from windlass.model.access import Role
from windlass.model.errors import BadInput

app = typer.Typer(help="Create and revoke tokens for the HTTP API.", no_args_is_help=True)
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

    from windlass.model.access import API_PREFIX, hash_of, new_token
    from windlass.model.task import is_name
    from windlass.wire import stores

    if not is_name(name):
        raise BadInput(f"{name!r} cannot be a token's name: use letters, digits and _ . : -, at most 63 of them.")
    token = new_token(API_PREFIX, secrets.SystemRandom())
    async with stores.access_store(load(config, data_dir).config) as store:
        created = await store.create_token(name, role, hash_of(token))
    if as_json:
        print_json({"name": created.name, "role": created.role, "token": token})
    else:
        print(token)


@app.command("list")
@command
async def list_(config: ConfigFile = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List tokens, newest first; the tokens themselves nobody knows."""
    from windlass.wire import stores

    async with stores.access_store(load(config, data_dir).config) as store:
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
async def revoke(name: Name, config: ConfigFile = None, data_dir: DataDir = None) -> None:
    """From now on the token opens nothing."""
    from windlass.wire import stores

    async with stores.access_store(load(config, data_dir).config) as store:
        if not await store.revoke_token(name):
            raise BadInput(f"there is no token {name} in use: `windlass tokens list` shows all.")
    print(f"revoked {name}")
