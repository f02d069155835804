"""Named queries from `.sql` files: each begins with a line `-- name: its_name`."""

from importlib import resources


def read_queries(package: str, file: str) -> dict[str, str]:
    """Statements by name, without the final semicolon."""
    text = resources.files(package).joinpath(file).read_text()
    named = (block.split("\n", 1) for block in text.split("-- name: ")[1:])
    return {name.strip(): sql.strip().rstrip(";") for name, sql in named}
