"""Writes the schema that databases of the first release have, for the test that compares it with schema/.

Before the first release: run `python tools/schema_baseline.py` after every change of src/windlass/store/schema/.
After the first release: never again. Every change then needs a delta in src/windlass/store/migrations/.
"""

import gzip
from pathlib import Path

from windlass.store.migration import MIGRATIONS, SCHEMA

BASELINE = Path(__file__).parent.parent / "tests" / "postgres" / "schema_baseline.sql.gz"


def main() -> None:
    if MIGRATIONS:
        raise SystemExit(
            "the baseline is the schema of the first release: it does not change once there are migrations"
        )
    # Without a time stamp: the same schema gives the same file.
    BASELINE.write_bytes(gzip.compress(SCHEMA.sql.encode(), mtime=0))
    print(f"wrote {BASELINE}: {len(SCHEMA.sql.splitlines())} lines")


if __name__ == "__main__":
    main()
