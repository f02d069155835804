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
  v_function record;
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

  -- Adopted tables (adoption_template.sql). These functions write Windlass's tables, and the table's owner calls one of
  -- them; the others write the adopted table, belong to its owner, and Windlass calls them.
  for v_function in
    select f.oid::regprocedure::text as signature, o.rolname as owner,
      row_changed.proowner::regrole::text as table_owner, s.suffix, s.is_ours,
      has_function_privilege('windlass_owner', f.oid, 'execute') as is_granted
    from windlass.adoptions a
    cross join (
      values ('report', true), ('task_changed', true), ('write', false), ('rows', false), ('next', false), ('active', false)
    ) as s (suffix, is_ours)
    join pg_proc f on f.pronamespace = to_regnamespace('windlass_adopt') and f.proname = a.name || '_' || s.suffix
    join pg_roles o on o.oid = f.proowner
    join pg_proc row_changed
      on row_changed.pronamespace = f.pronamespace and row_changed.proname = a.name || '_row_changed'
  loop
    if v_function.is_ours then
      execute format('alter function %s owner to windlass_owner', v_function.signature);
      if v_function.suffix = 'report' then
        execute format('grant usage on schema windlass_adopt to %s', v_function.table_owner);
        execute format('grant execute on function %s to %s', v_function.signature, v_function.table_owner);
      end if;
    elsif not v_function.is_granted then
      if not pg_has_role(v_function.owner, 'usage') then
        raise exception 'an adopted table belongs to %, and this user may not act as it: grant % to this user first',
          v_function.owner, v_function.owner;
      end if;
      execute format('grant execute on function %s to windlass_owner', v_function.signature);
    end if;
  end loop;
end
$$;

set local role windlass_owner;
select windlass_internal.apply_roles();

commit;
