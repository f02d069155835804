"""`windlass` of a pretended next release: `python next_release.py db migrate`, `python next_release.py up ...`

It is this tree with one more migration, which changes tables that workers use all the time. Programs of this tree
refuse the migrated database, as those of an earlier release would; workers need their contract only.
"""

from windlass.store import migration
from windlass.store.migration import LATEST_VERSION, MIGRATIONS, Migration

# What a next release may do within contract 1.
NEXT = Migration(
    LATEST_VERSION + 1,
    "next_release",
    """
alter table windlass.tasks add column colour text;
alter table windlass.workers add column shoe_size integer not null default 42;
create function windlass.paint_task(p_task_id bigint, p_colour text) returns void language sql
as $$ update windlass.tasks set colour = p_colour where id = p_task_id $$;
create index tasks_colour on windlass.tasks (colour) where colour is not null;
-- rollback
drop function windlass.paint_task(bigint, text);
alter table windlass.tasks drop column colour;
alter table windlass.workers drop column shoe_size;
""",
)

if __name__ == "__main__":
    migration.MIGRATIONS = [*MIGRATIONS, NEXT]
    migration.LATEST_VERSION = NEXT.version
    # Imported after the change: modules of the command line copy the version when they are imported.
    from windlass.cli.app import main

    main()
