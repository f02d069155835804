"""Named queries from `.sql` files: each begins with a line `-- name: its_name`.

A name like `tasks_{complete|failed}` defines one query per word, with the word in place of `{variant}` in the text.
"""

import re
from importlib import resources

_VARIANTS = re.compile(r"\{(\w+(?:\|\w+)+)\}")


def read_queries(package: str, file: str) -> dict[str, str]:
    """Statements by name, without the final semicolon."""
    text = resources.files(package).joinpath(file).read_text()
    queries: dict[str, str] = {}
    for block in text.split("-- name: ")[1:]:
        name, sql = block.split("\n", 1)
        name, sql = name.strip(), sql.strip().rstrip(";")
        variants = _VARIANTS.search(name)
        if variants is None:
            queries[name] = sql
            continue
        for word in variants[1].split("|"):
            queries[name.replace(variants[0], word)] = sql.replace("{variant}", word)
    return queries
