"""The catalog of Windlass's schemas as plain text, to compare two databases.

Contains tables, columns (without their order), constraints, indexes, views, functions with their source, triggers,
types, domains, privileges and policies. Contains no rows.
"""

from typing import Any

import asyncpg

# Object to definition. One row per object; names are qualified and stable.
_OBJECTS = """
with schemas as (
  select oid, nspname, nspacl from pg_namespace where nspname in ('windlass', 'windlass_internal', 'windlass_adopt')
),
relations as (
  select c.*, c.oid::regclass::text as name from pg_class c join schemas s on s.oid = c.relnamespace
)
select 'schema ' || nspname as object, format('privileges %s', nspacl) as definition
from schemas
union all
select 'relation ' || name,
  format('kind %s, options %s, privileges %s, row security %s, policies %s', relkind, reloptions, relacl,
    relrowsecurity, array(
      select format('%s %s', p.polname, pg_get_expr(p.polqual, p.polrelid)) from pg_policy p
      where p.polrelid = relations.oid
    ))
from relations
where relkind not in ('i', 'c')
union all
select 'column ' || r.name || '.' || a.attname,
  format('%s, not null %s, default %s, identity %s, privileges %s', format_type(a.atttypid, a.atttypmod), a.attnotnull,
    pg_get_expr(d.adbin, d.adrelid), a.attidentity, a.attacl)
from relations r
join pg_attribute a on a.attrelid = r.oid and a.attnum > 0 and not a.attisdropped
left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
where r.relkind in ('r', 'c')
union all
select 'constraint ' || coalesce(c.conrelid::regclass::text, c.contypid::regtype::text) || ' ' || c.conname,
  pg_get_constraintdef(c.oid)
from pg_constraint c
join schemas s on s.oid = c.connamespace
union all
select 'index ' || name, pg_get_indexdef(oid)
from relations
where relkind = 'i'
union all
select 'view ' || name, pg_get_viewdef(oid)
from relations
where relkind = 'v'
union all
select 'function ' || p.oid::regprocedure::text, format('%s privileges %s', pg_get_functiondef(p.oid), p.proacl)
from pg_proc p
join schemas s on s.oid = p.pronamespace
union all
select 'trigger ' || r.name || ' ' || t.tgname, pg_get_triggerdef(t.oid)
from pg_trigger t
join relations r on r.oid = t.tgrelid
where not t.tgisinternal
union all
select 'domain ' || t.oid::regtype::text,
  format('%s, not null %s', format_type(t.typbasetype, t.typtypmod), t.typnotnull)
from pg_type t
join schemas s on s.oid = t.typnamespace
where t.typtype = 'd'
"""


async def catalog(dsn: str) -> dict[str, str]:
    connection: Any = await asyncpg.connect(dsn)
    try:
        # Qualified names in all definitions, whatever the user's search_path.
        await connection.execute("set search_path = pg_catalog")
        return {row["object"]: row["definition"] for row in await connection.fetch(_OBJECTS)}
    finally:
        await connection.close()
