-- Roles with the least privileges. Apply this script as the user who applied the schema; it may be repeated.
--
--   windlass_owner         owns the schema; migrations run as it
--   windlass_orchestrator  `windlass up`, the HTTP server, operators
--   windlass_producer      enqueues tasks, reads their results, retries and cancels them
--   windlass_worker        acts as the worker whose secret it has
--   windlass_viewer        reads the views
--
-- Then grant a role to each user:
--   create role shop login password '...' in role windlass_producer;
-- Supabase's roles (service_role, authenticated, anon) get their rights too, where they exist.
begin;

do $$
declare
  v_name text;
begin
  if to_regprocedure('windlass_internal.apply_roles()') is null then
    raise exception 'this database has no windlass schema: apply `windlass db sql` or `windlass db migrate` first';
  end if;
  foreach v_name in array array[
    'windlass_owner', 'windlass_orchestrator', 'windlass_producer', 'windlass_worker', 'windlass_viewer'
  ] loop
    if not exists (select from pg_roles r where r.rolname = v_name) then
      execute format('create role %I nologin', v_name);
    end if;
  end loop;

  -- This user goes on migrating the schema, and gives it away: both need the membership. A superuser has it.
  if not pg_has_role('windlass_owner', 'usage') then
    execute format('grant windlass_owner to %I', current_user);
  end if;
  for v_name in select n.nspname from pg_namespace n where n.nspname in ('windlass', 'windlass_internal', 'windlass_adopt') loop
    execute format('alter schema %I owner to windlass_owner', v_name);
  end loop;
  for v_name in
    select format('alter %s %I.%I owner to windlass_owner', case c.relkind when 'v' then 'view' else 'table' end,
      n.nspname, c.relname)
    from pg_class c
    join pg_namespace n on n.oid = c.relnamespace
    where n.nspname in ('windlass', 'windlass_internal') and c.relkind in ('r', 'v')
    union all
    select format('alter type %I.%I owner to windlass_owner', n.nspname, t.typname)
    from pg_type t
    join pg_namespace n on n.oid = t.typnamespace
    left join pg_class c on c.oid = t.typrelid
    where n.nspname in ('windlass', 'windlass_internal') and (t.typtype = 'd' or c.relkind = 'c')
    union all
    select format('alter function %s owner to windlass_owner', f.oid::regprocedure)
    from pg_proc f
    where f.pronamespace in ('windlass'::regnamespace, 'windlass_internal'::regnamespace)
  loop
    execute v_name;
  end loop;
end
$$;

set local role windlass_owner;
select windlass_internal.apply_roles();

commit;
