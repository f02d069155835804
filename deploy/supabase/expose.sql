-- Exposes the schema windlass over PostgREST (Supabase's Data API), so that signed-in users may call `submit_task` and
-- read `my_tasks`, and the role service_role may enqueue. Roles decide what each caller may do: run `windlass db roles`
-- first. Users of an adopted table need none of this.
--
-- Run this file in the SQL editor; it may be repeated. The setting overrides the list in the dashboard (Settings, Data
-- API), which SQL cannot read: if you exposed other schemas there, add them to v_exposed. To take it back:
--   alter role authenticator reset pgrst.db_schemas; notify pgrst, 'reload config';

do $$
declare
  v_exposed text := 'public, graphql_public';
begin
  select coalesce(max(substr(entry, length('pgrst.db_schemas=') + 1)), v_exposed) into v_exposed
  from pg_db_role_setting as s
  join pg_roles as r on r.oid = s.setrole and r.rolname = 'authenticator'
  cross join unnest(s.setconfig) as entry
  where s.setdatabase = 0 and starts_with(entry, 'pgrst.db_schemas=');
  if 'windlass' <> all (regexp_split_to_array(v_exposed, '\s*,\s*')) then
    execute format('alter role authenticator set pgrst.db_schemas = %L', v_exposed || ', windlass');
  end if;
end
$$;

-- PostgREST listens on this channel.
notify pgrst, 'reload config';
notify pgrst, 'reload schema';
