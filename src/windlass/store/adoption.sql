-- name: adopted_table
-- check_table: the table and the rights of this user. No row: there is no such table.
select
  c.relkind::text as kind,
  o.rolname as owner,
  o.rolsuper as is_owner_superuser,
  w.rolname as windlass_owner,
  c.relrowsecurity as has_rls,
  c.relforcerowsecurity and not (o.rolsuper or o.rolbypassrls) as is_rls_forced,
  pg_has_role(c.relowner, 'usage') as may_act_as_owner,
  pg_has_role(s.nspowner, 'usage') as may_act_as_windlass,
  has_schema_privilege('public', n.oid, 'create') as can_anyone_create,
  -- Constraint triggers are among them.
  array(
    select k.conname::text from pg_constraint k where k.conrelid = c.oid and k.condeferred order by k.conname
  ) as deferred_constraints
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
join pg_roles o on o.oid = c.relowner
join pg_namespace s on s.nspname = 'windlass'
join pg_roles w on w.oid = s.nspowner
where n.nspname = $1 and c.relname = $2;

-- name: adopted_columns
-- check_table: type, base type and constraints of each column. Types of domains are those they are based on.
select
  a.attname as name,
  format_type(a.atttypid, null) as type,
  format_type(coalesce(nullif(t.typbasetype, 0), t.oid), null) as base_type,
  t.typcategory::text as category,
  a.attnotnull or t.typnotnull as is_not_null,
  a.attgenerated <> '' or a.attidentity = 'a' as is_generated,
  exists (
    select from pg_index i
    where i.indrelid = a.attrelid and i.indisunique and i.indisvalid and i.indpred is null and i.indnkeyatts = 1
      and i.indkey[0] = a.attnum
  ) as is_unique,
  exists (select from pg_index i where i.indrelid = a.attrelid and i.indisvalid and i.indkey[0] = a.attnum) as has_index,
  (
    select min(f.confrelid::regclass::text) from pg_constraint f
    where f.conrelid = a.attrelid and f.contype = 'f' and f.conkey = array[a.attnum]
  ) as references_table,
  array(select e.enumlabel::text from pg_enum e where e.enumtypid = t.oid order by e.enumsortorder) as labels,
  array(
    select pg_get_constraintdef(k.oid) from pg_constraint k
    where k.conrelid = a.attrelid and k.contype = 'c' and a.attnum = any (k.conkey)
  ) as checks
from pg_attribute a
join pg_class c on c.oid = a.attrelid
join pg_namespace n on n.oid = c.relnamespace
join pg_type t on t.oid = a.atttypid
where n.nspname = $1 and c.relname = $2 and a.attnum > 0 and not a.attisdropped;

-- name: adopted_triggers
-- check_table: triggers of the table: ours, and those of others that run when Windlass writes a row.
select t.tgname as name, t.tgenabled = 'D' as is_disabled, t.tgfoid::regproc::text as function,
  t.tgname like 'windlass\_adopt\_%' as is_ours
from pg_trigger t
join pg_class c on c.oid = t.tgrelid
join pg_namespace n on n.oid = c.relnamespace
where n.nspname = $1 and c.relname = $2 and not t.tgisinternal
order by t.tgname;

-- name: adoption
select * from windlass_internal.adoptions where name = $1;

-- name: adoptions
select name, table_schema, table_name, checksum, backfilled_at from windlass_internal.adoptions order by name;

-- name: differences
-- compare: how often each difference occurs, with one example.
select d.difference, count(*) as count, min(d.row_key) as example from windlass_internal.compare_rows($1) as d
where not d.is_deferred
group by d.difference
order by d.difference;

-- name: deferred
select count(distinct d.row_key) as count, min(d.at) as since, max(d.attempts) as attempts,
  (array_agg(d.reason order by d.attempts desc, d.id desc))[1] as reason
from windlass_internal.deferred_rows d where d.adoption = $1;
