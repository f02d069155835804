-- The schema of windlass {program_version}, from version {from_version} to {to_version}, to apply by hand
-- (Supabase's SQL editor, a change review). It applies completely or not at all, like `windlass db migrate`.
begin;
set local lock_timeout = '{lock_timeout_s}s';
select pg_advisory_xact_lock({lock_key});

do $check$
declare
  v_version integer := 0;
begin
  if to_regclass('windlass.migrations') is not null then
    execute 'select coalesce(max(version), 0) from windlass.migrations' into v_version;
  end if;
  if v_version <> {from_version} then
    raise exception 'the schema is at version %, this script starts at {from_version}: nothing was changed', v_version;
  end if;
end
$check$;

{migrations}
commit;
