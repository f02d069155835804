-- name: apply
-- Windlass: adopt a table. Rows become tasks, and the outcome of a task is written into its row (docs/adopt.md).
-- The table gets triggers and is otherwise unchanged. Everything else is in the schemas windlass and windlass_adopt.
-- Apply it as a user who may act as the owner of the table and as the owner of the schema windlass. It may be repeated.
begin;
-- Shorter than deadlock_timeout: if programs use the table, this script ends and not one of them. Then repeat it.
set local lock_timeout = '800ms';

do @q@
begin
  if to_regclass('windlass.adoptions') is null then
    raise exception 'this database has no windlass schema: run `windlass db migrate` first';
  end if;
  if to_regclass(@table_text@) is null then
    raise exception 'table % not found', @table_text@;
  end if;
  if exists (
    select from windlass.adoptions a
    where a.name = @name@ and (a.table_schema, a.table_name) <> (@schema_text@, @table_name_text@)
  ) then
    raise exception '% adopts another table: remove that first', @name@;
  end if;
  if exists (
    select from windlass.adoptions a
    where a.name <> @name@ and (a.table_schema, a.table_name) = (@schema_text@, @table_name_text@)
  ) then
    raise exception 'table % is already adopted by another name', @table_text@;
  end if;
  -- Each function runs with the rights of the owner of the table that it writes.
  perform set_config('windlass.owner', (
    select r.rolname from pg_namespace n join pg_roles r on r.oid = n.nspowner where n.nspname = 'windlass'), true);
  perform set_config('windlass.table_owner', (
    select r.rolname from pg_class c join pg_roles r on r.oid = c.relowner where c.oid = to_regclass(@table_text@)), true);
  perform set_config('role', current_setting('windlass.owner'), true);
  if current_setting('windlass.owner') <> current_setting('windlass.table_owner') then
    execute format('grant usage, create on schema windlass_adopt to %I', current_setting('windlass.table_owner'));
  end if;
end @q@;

insert into windlass.adoptions (name, table_schema, table_name, states, max_attempts, timeout_s, checksum)
values (@name@, @schema_text@, @table_name_text@, @states_json@, @max_attempts@, @timeout_s@, @checksum@)
on conflict (name) do update
set states = excluded.states, max_attempts = excluded.max_attempts, timeout_s = excluded.timeout_s,
    checksum = excluded.checksum, applied_at = windlass.now();

-- What the owner of the table may do here: report changes of its rows. Only plain values arrive, because casts and types
-- of the table's owner must not run with the rights of this function.
create or replace function windlass_adopt.@report@(
  p_change text, p_key text, p_status text, p_has_new_status boolean, p_queue text, p_payload jsonb, p_priority integer,
  p_run_after timestamptz, p_owner text
) returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as @q@
begin
  case p_change
    when 'truncated' then
      perform windlass_internal.withdraw_all_rows(@name@, 'its table was truncated');
    when 'deleted' then
      perform windlass_internal.withdraw_row(@name@, p_key, 'its row was deleted');
    when 'moved' then
      perform windlass_internal.withdraw_row(@name@, p_key, 'its row has another key');
    when 'changed' then
      perform windlass_internal.adopt_row(@name@, p_key, p_status, @means_of_status@, p_has_new_status,
        @reported_queue@, p_payload, p_priority, p_run_after, p_owner);
  end case;
end
@q@;

-- A task changed: write its row. If that is impossible now, the change is deferred; the task keeps its outcome.
create or replace function windlass_adopt.@task_changed@() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as @q@
declare
  v_before text := @status_of_old@;
  v_after text := @status_of_new@;
  v_settings text[] := windlass_internal.session_settings();
  v_outcome text;
begin
  if current_setting('windlass.withdraws', true) = @name@ then
    return null;
  end if;
  begin
    v_outcome := windlass_adopt.@write@(new.unique_key, array[v_before, v_after], v_after, new.attempts,
      new.worker_id, new.started_at, new.finished_at, new.progress, new.result, new.error_code::text, new.error);
    perform windlass_internal.check_session_settings(v_settings);
  exception
    when others then
      perform windlass_internal.defer_rejected_row(@name@, new.unique_key, v_before, sqlerrm, new.id);
      return null;
  end;
  if v_outcome = 'locked' then
    perform windlass_internal.defer_row(@name@, new.unique_key, v_before, 'its row was locked');
  elsif v_outcome = 'changed' then
    perform windlass_internal.defer_row(@name@, new.unique_key, null, 'its row was changed', true);
  end if;
  return null;
end
@q@;

do @q@
begin
  revoke all on function windlass_adopt.@report@(@report_arguments@), windlass_adopt.@task_changed@() from public;
  execute format(@grant_report@, current_setting('windlass.table_owner'));
  perform set_config('role', current_setting('windlass.table_owner'), true);
end @q@;

-- A row changed: report it to Windlass, with the rights of the table's owner. Callers need none of their own.
create or replace function windlass_adopt.@row_changed@() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as @q@
#variable_conflict use_variable
declare
  r record;
  v_before jsonb;
  v_queue text;
  v_payload jsonb;
  v_priority integer;
  v_run_after timestamptz;
  v_has_new_status boolean := true;
begin
  if tg_op = 'TRUNCATE' then
    perform windlass_adopt.@report@('truncated', null, null, null, null, null, null, null, null);
    return null;
  end if;
  if tg_op = 'DELETE' then
    perform windlass_adopt.@report@('deleted', old.@key@::text, null, null, null, null, null, null, null);
    return null;
  end if;
  if tg_op = 'UPDATE' then
    -- Windlass wrote this itself.
    if current_setting('windlass.written_row', true)
      = @name@ || ' ' || new.@key@::text || ' ' || coalesce(new.@status@::text, '')
    then
      return null;
    end if;
    if old.@key@::text <> new.@key@::text then
      perform windlass_adopt.@report@('moved', old.@key@::text, null, null, null, null, null, null, null);
    else
      v_has_new_status := old.@status@::text is distinct from new.@status@::text;
    end if;
    if not v_has_new_status then
      if new.@status@::text is null or new.@status@::text <> all (@active@) then
        return null;
      end if;
      r := old;
      v_before := jsonb_build_array(@queue_of_r@, @payload_of_r@, @priority_of_r@, @run_after_of_r@);
    end if;
  end if;
  r := new;
  v_queue := @queue_of_r@;
  v_payload := @payload_of_r@;
  v_priority := @priority_of_r@;
  v_run_after := @run_after_of_r@;
  if not v_has_new_status and v_before = jsonb_build_array(v_queue, v_payload, v_priority, v_run_after) then
    return null;
  end if;
  perform windlass_adopt.@report@('changed', r.@key@::text, r.@status@::text, v_has_new_status, v_queue, v_payload,
    v_priority, v_run_after, @owner_of_r@);
  return null;
end
@q@;

-- The next functions belong to the table's owner, who cannot replace them but could alter them to run with the rights of
-- their caller: Windlass. Each checks that before any other expression, and with names that no search_path changes.

-- Write the state of a task into its row: written, locked, missing, or changed (its status is not one of p_expected).
create or replace function windlass_adopt.@write@(
  p_key text, p_expected text[], p_status text, p_attempts integer, p_worker text, p_started_at timestamptz,
  p_finished_at timestamptz, p_progress real, p_result jsonb, p_error_code text, p_error text
) returns text
language plpgsql security definer
set search_path = pg_catalog, @schema@, pg_temp
set lock_timeout = '2s'
as @q@
#variable_conflict use_variable
begin
  @check_user_of_write@
  declare
    v_key @table@.@key@%type := p_key;
    v_found text;
@declarations@
  begin
    select t.@status@::text into v_found from @table@ t where t.@key@ = v_key for no key update skip locked;
    if not found then
      return case when exists (select from @table@ t where t.@key@ = v_key) then 'locked' else 'missing' end;
    end if;
    if v_found is null or v_found <> all (p_expected) then
      return 'changed';
    end if;
    perform set_config('windlass.written_row', @name@ || ' ' || p_key || ' ' || p_status, true);
    update @table@ t
    set @assignments@
    where t.@key@ = v_key;
    perform set_config('windlass.written_row', '', true);
    return 'written';
  end;
end
@q@;

-- Lock these rows and read what Windlass needs of them. A row that another transaction has locked is not held.
create or replace function windlass_adopt.@rows@(p_keys text[])
returns table (
  row_key text, is_held boolean, row_status text, means text[], queue text, payload jsonb, priority integer,
  run_after timestamptz, owner text
)
language plpgsql security definer
set search_path = pg_catalog, @schema@, pg_temp
as @q@
#variable_conflict use_variable
begin
  @check_user_of_rows@
  declare
    v_key @table@.@key@%type;
    r record;
  begin
    foreach row_key in array p_keys loop
      v_key := row_key;
      select t.* into r from @table@ t where t.@key@ = v_key for no key update skip locked;
      is_held := found;
      if is_held then
        row_status := r.@status@::text;
        means := @means_of_r@;
        queue := @queue_of_r@;
        payload := @payload_of_r@;
        priority := @priority_of_r@;
        run_after := @run_after_of_r@;
        owner := @owner_of_r@;
        return next;
      elsif exists (select from @table@ t where t.@key@ = v_key) then
        return next;
      end if;
    end loop;
  end;
end
@q@;

-- The next queued rows of the backfill, and the place to continue at.
create or replace function windlass_adopt.@next@(p_after jsonb, p_limit integer)
returns table (row_key text, place jsonb)
language plpgsql stable security definer
set search_path = pg_catalog, @schema@, pg_temp
as @q@
#variable_conflict use_variable
begin
  @check_user_of_next@
  declare
    v_order @table@.@order@%type;
    v_key @table@.@key@%type;
  begin
    if p_after is null then
      return query
        select t.@key@::text, jsonb_build_array(t.@order@, t.@key@) from @table@ t
        where t.@status@::text = @queued@
        order by @order_list@ limit p_limit;
      return;
    end if;
    v_order := p_after ->> 0;
    v_key := p_after ->> 1;
    return query
      select t.@key@::text, jsonb_build_array(t.@order@, t.@key@) from @table@ t
      where t.@status@::text = @queued@ and @after@
      order by @order_list@ limit p_limit;
  end;
end
@q@;

-- The rows that should have a task, for the comparison of both sides.
create or replace function windlass_adopt.@active_rows@()
returns table (row_key text, row_status text)
language plpgsql stable security definer
set search_path = pg_catalog, @schema@, pg_temp
as @q@
#variable_conflict use_variable
begin
  @check_user_of_active_rows@
  return query
    select t.@key@::text, t.@status@::text from @table@ t where t.@status@::text = any (@active@);
end
@q@;

do @q@
begin
  revoke all on function
    windlass_adopt.@write@(text, text[], text, integer, text, timestamptz, timestamptz, real, jsonb, text, text),
    windlass_adopt.@rows@(text[]), windlass_adopt.@next@(jsonb, integer), windlass_adopt.@active_rows@(),
    windlass_adopt.@row_changed@()
  from public;
  execute format(@grant_functions@, current_setting('windlass.owner'));
end @q@;

create or replace trigger @on_insert@
  after insert on @table@
  for each row when (new.@status@::text = @queued@)
  execute function windlass_adopt.@row_changed@();
create or replace trigger @on_update@
  after update on @table@
  for each row execute function windlass_adopt.@row_changed@();
create or replace trigger @on_delete@
  after delete on @table@
  for each row execute function windlass_adopt.@row_changed@();
create or replace trigger @on_truncate@
  after truncate on @table@
  for each statement execute function windlass_adopt.@row_changed@();

do @q@
begin
  perform set_config('role', current_setting('windlass.owner'), true);
  if current_setting('windlass.owner') <> current_setting('windlass.table_owner') then
    execute format('revoke create on schema windlass_adopt from %I', current_setting('windlass.table_owner'));
  end if;
end @q@;

create or replace trigger @on_task@
  after update on windlass.tasks
  for each row when (
    new.adoption = @name@
    and (old.status::text, old.attempts, old.worker_id, old.started_at, old.finished_at, old.error_code::text, @old_progress@)
      is distinct from
      (new.status::text, new.attempts, new.worker_id, new.started_at, new.finished_at, new.error_code::text, @new_progress@)
  )
  execute function windlass_adopt.@task_changed@();
commit;

-- name: remove
begin;
set local lock_timeout = '800ms';

do @q@
declare
  v_owner text := (
    select r.rolname from pg_namespace n join pg_roles r on r.oid = n.nspowner where n.nspname = 'windlass');
  v_table_owner text := coalesce(
    (select r.rolname from pg_class c join pg_roles r on r.oid = c.relowner where c.oid = to_regclass(@table_text@)),
    v_owner);
begin
  -- Its table may be gone, and its triggers with it.
  if to_regclass(@table_text@) is not null then
    perform set_config('role', v_table_owner, true);
    -- In the same order as a change of a row.
    lock table @table@ in access exclusive mode;
    perform set_config('role', v_owner, true);
    lock table windlass.tasks in share row exclusive mode;
    if to_regprocedure(@write_text@) is not null then
      perform windlass_internal.release_rows(@name@, 2147483647);
    end if;
    perform set_config('role', v_table_owner, true);
    drop trigger if exists @on_insert@ on @table@;
    drop trigger if exists @on_update@ on @table@;
    drop trigger if exists @on_delete@ on @table@;
    drop trigger if exists @on_truncate@ on @table@;
  end if;
  perform set_config('role', v_owner, true);
  drop trigger if exists @on_task@ on windlass.tasks;
  perform windlass_internal.withdraw_all_rows(@name@, 'its table is no longer adopted');
  drop function if exists
    windlass_adopt.@row_changed@(), windlass_adopt.@task_changed@(), windlass_adopt.@report@(@report_arguments@),
    windlass_adopt.@write@(text, text[], text, integer, text, timestamptz, timestamptz, real, jsonb, text, text),
    windlass_adopt.@rows@(text[]), windlass_adopt.@next@(jsonb, integer), windlass_adopt.@active_rows@();
  if v_table_owner <> v_owner and not exists (
    select from pg_proc p join pg_roles r on r.oid = p.proowner
    where p.pronamespace = 'windlass_adopt'::regnamespace and r.rolname = v_table_owner
  ) then
    execute format('revoke all on schema windlass_adopt from %I', v_table_owner);
  end if;
  delete from windlass.deferred_rows where adoption = @name@;
  delete from windlass.adoptions where name = @name@;
end @q@;
commit;
