-- Adopted tables: a table of another program whose rows are tasks (docs/adopt.md).
--
-- `windlass db adopt` generates triggers and functions for each such table, in the schema windlass_adopt: they read and
-- write its columns. The rules are here. A row is wanted while its status is the one of the state `queued`; every other
-- status that Windlass did not write itself withdraws the task. In the other direction each change of a task is written
-- into its row, in the same transaction.
--
-- Locks. A change of a row locks the row and then its task; a change of a task locks the task and then its row. So that
-- these orders cannot deadlock, neither waits for the other: a row or task that another transaction has locked is
-- skipped and recorded in deferred_rows, and settle_rows handles it later. A task is inserted only by a transaction
-- that holds its row.

-- The adopted tables.
create table windlass.adoptions (
  name windlass.name primary key check (length(name) <= 30),
  table_schema text not null,
  table_name text not null,
  -- The status of a row for each state of its task: {"queued", "running", "retrying", "complete", "failed",
  -- "cancelled"}.
  states jsonb not null,
  max_attempts windlass.attempt_limit not null,
  timeout_s windlass.time_limit_s,
  -- Identifies the script that was applied. `windlass doctor` compares it with the configuration.
  checksum text not null,
  applied_at timestamptz not null default windlass.now(),
  -- Where the next batch of the backfill begins. Null: at the beginning.
  backfill_after jsonb,
  backfilled bigint not null default 0,
  backfilled_at timestamptz
);

-- Rows and tasks that differ because one of them was locked, or because the table refused a change. Only inserted into
-- and deleted from: an update would wait for other transactions.
create table windlass.deferred_rows (
  id bigint generated always as identity primary key,
  adoption text not null,
  row_key text not null,
  -- The status of the row before the change that could not be written. A row that still has it is behind its task.
  -- Null: the owner of the row changed its status, and the task must follow.
  expected text,
  reason text not null,
  at timestamptz not null default windlass.now(),
  attempts integer not null default 0,
  retry_at timestamptz not null default windlass.now(),
  -- The table refused the change, or the row cannot become a task: it stays so until a person fixes the cause.
  is_rejected boolean not null default false
);
create index deferred_rows_row on windlass.deferred_rows (adoption, row_key);
create index deferred_rows_rejected on windlass.deferred_rows (adoption, row_key) where is_rejected;
create index deferred_rows_due on windlass.deferred_rows (retry_at);

-- The settings of the session that Windlass relies on. Triggers, casts and defaults of a table's owner run in it, and a
-- plain SET in them outlives their function. A changed setting raises, which undoes the change with the write. All names
-- in the next two functions have a schema, or a search_path that was changed could hide the change.
create function windlass_internal.session_settings() returns text[]
language sql
as $$
  select array[
    pg_catalog.current_setting('search_path'), coalesce(pg_catalog.current_setting('windlass.now', true), ''),
    coalesce(pg_catalog.current_setting('windlass.actor', true), ''),
    coalesce(pg_catalog.current_setting('windlass.withdraws', true), '')
  ]
$$;

create function windlass_internal.check_session_settings(p_before text[]) returns void
language plpgsql
as $$
begin
  if windlass_internal.session_settings() operator(pg_catalog.<>) p_before then
    raise exception 'code of the table changed search_path or a setting of windlass: give its function a SET clause'
      using errcode = 'insufficient_privilege';
  end if;
end
$$;

-- The state of a task in the terms of windlass.adoptions.states.
create function windlass_internal.adopted_state(p_status text, p_error_code text) returns text
language sql immutable parallel safe
as $$
  select case
    when p_status = 'failed' and p_error_code = 'CANCELLED' then 'cancelled'
    when p_status = 'error' then 'retrying'
    else p_status
  end
$$;

-- Whether a change of this row waits to be settled. Retention keeps its task until then.
create function windlass_internal.is_deferred(p_adoption text, p_key text) returns boolean
language sql stable
as $$
  select p_adoption is not null and exists (
    select from windlass.deferred_rows d where d.adoption = p_adoption and d.row_key = p_key
  )
$$;

-- p_is_weak: not if anything of this row is deferred already.
create function windlass_internal.defer_row(
  p_adoption text, p_key text, p_expected text, p_reason text, p_is_weak boolean default false,
  p_is_rejected boolean default false
) returns void
language plpgsql
as $$
begin
  if exists (
    select from windlass.deferred_rows d
    where d.adoption = p_adoption and d.row_key = p_key and (p_is_weak or d.expected is not distinct from p_expected)
  ) then
    return;
  end if;
  insert into windlass.deferred_rows (adoption, row_key, expected, reason, is_rejected)
  values (p_adoption, p_key, p_expected, left(p_reason, 500), p_is_rejected);
end
$$;

-- The table refused a change of a row: a constraint, a trigger or a missing right. The task keeps its outcome.
create function windlass_internal.defer_rejected_row(
  p_adoption text, p_key text, p_expected text, p_error text, p_task_id bigint
) returns void
language plpgsql
as $$
begin
  if not windlass_internal.is_deferred(p_adoption, p_key) then
    perform windlass_internal.add_event('ROW_REJECTED', format('its row was not written: %s', left(p_error, 500)),
      null, null, p_task_id);
  end if;
  perform windlass_internal.defer_row(p_adoption, p_key, p_expected, p_error, p_is_rejected => true);
end
$$;

-- Cancel locked tasks without writing their rows: the owner of the rows decided, and they stay as they are.
create function windlass_internal.withdraw_tasks(p_adoption text, p_task_ids bigint[], p_reason text) returns void
language plpgsql
as $$
begin
  -- The generated trigger of windlass.tasks skips these rows.
  perform set_config('windlass.withdraws', p_adoption, true);
  perform windlass_internal.cancel_locked_tasks(p_task_ids, p_reason);
  perform set_config('windlass.withdraws', '', true);
end
$$;

-- A row was deleted, or got another key.
create function windlass_internal.withdraw_row(p_adoption text, p_key text, p_reason text) returns void
language plpgsql
as $$
declare
  v_task windlass.tasks;
begin
  perform windlass_internal.check_settings();
  select t.* into v_task from windlass.tasks t
  where t.adoption = p_adoption and t.unique_key = p_key and t.adoption is not null
  for no key update skip locked;
  if found and v_task.status in ('queued', 'running', 'error') then
    perform windlass_internal.withdraw_tasks(p_adoption, array[v_task.id], p_reason);
  elsif not found and exists (select from windlass.tasks t where t.adoption = p_adoption and t.unique_key = p_key) then
    perform windlass_internal.defer_row(p_adoption, p_key, null, p_reason);
  end if;
end
$$;

-- The table was truncated, or is no longer adopted. Its tasks are cancelled together: there may be many.
create function windlass_internal.withdraw_all_rows(p_adoption text, p_reason text) returns void
language plpgsql
as $$
declare
  v_task_ids bigint[];
begin
  perform windlass_internal.check_settings();
  select array_agg(h.id) into v_task_ids
  from (
    select t.id from windlass.tasks t
    where t.adoption = p_adoption and t.status in ('queued', 'running', 'error')
    for no key update skip locked
  ) as h;
  perform windlass_internal.withdraw_tasks(p_adoption, v_task_ids, p_reason);
  -- Those that are left are locked.
  perform windlass_internal.defer_row(p_adoption, t.unique_key, null, p_reason)
  from windlass.tasks t
  where t.adoption = p_adoption and t.status in ('queued', 'running', 'error');
end
$$;

-- Why a row cannot become a task. Null: it can.
create function windlass_internal.row_refusal(p_adoption text, p_key text, p_payload jsonb) returns text
language sql immutable parallel safe
as $$
  select case
    when length(p_key) > 200 then
      format('the key of this row has %s characters and windlass accepts at most 200', length(p_key))
    when octet_length(p_payload::text) > 1048576 then
      format('the payload of this row has %s bytes and at most 1048576 are accepted: map fewer columns in [adopt.%s]',
        octet_length(p_payload::text), p_adoption)
  end
$$;

-- A row was inserted or changed by its owner, or is found by the backfill. p_means: the states that its status stands
-- for. p_has_new_status: false if only the payload or another column was edited.
create function windlass_internal.adopt_row(
  p_adoption text, p_key text, p_status text, p_means text[], p_has_new_status boolean, p_queue text, p_payload jsonb,
  p_priority integer, p_run_after timestamptz, p_owner text
) returns void
language plpgsql
set enable_seqscan = off
as $$
declare
  v_is_wanted boolean := 'queued' = any (p_means);
  v_refusal text;
  v_task windlass.tasks;
begin
  perform windlass_internal.check_settings();
  v_refusal := windlass_internal.row_refusal(p_adoption, p_key, case when v_is_wanted then p_payload end);
  if v_refusal is not null then
    raise exception '%', v_refusal using errcode = 'program_limit_exceeded';
  end if;
  select t.* into v_task from windlass.tasks t
  where t.adoption = p_adoption and t.unique_key = p_key and t.adoption is not null
  for no key update skip locked;
  if not found then
    if exists (select from windlass.tasks t where t.adoption = p_adoption and t.unique_key = p_key) then
      perform windlass_internal.defer_row(
        p_adoption, p_key, case when not p_has_new_status then p_status end, 'its task was locked');
    elsif v_is_wanted then
      -- Only now: an insert would wait for a transaction that updates the task.
      insert into windlass.tasks (
        queue, payload, priority, run_after, max_attempts, timeout_s, unique_key, adoption, owner
      )
      select p_queue, coalesce(p_payload, 'null'), coalesce(p_priority, 0), p_run_after, a.max_attempts, a.timeout_s,
        p_key, a.name, coalesce(p_owner, nullif(current_setting('windlass.actor', true), ''))
      from windlass.adoptions a where a.name = p_adoption;
    end if;
    return;
  end if;

  if v_is_wanted and p_has_new_status and v_task.status <> 'queued' then
    -- The owner wants another run: the current attempt loses its claim, and all attempts are available again.
    update windlass.tasks
    set status = 'queued', queue = p_queue, payload = coalesce(p_payload, 'null'), priority = coalesce(p_priority, 0),
        run_after = p_run_after, ready_at = windlass.now(), attempts = 0, claim_token = null, worker_id = null,
        started_at = null, finished_at = null, progress = null, progress_note = null, result = null, error = null,
        error_code = null
    where id = v_task.id;
    if v_task.status = 'running' then
      perform windlass_internal.record_attempt_span(v_task.worker_id, v_task.id, v_task.queue, v_task.started_at,
        windlass.now());
    end if;
    perform windlass_internal.add_event('TASK_RETRIED', 'its row was queued again', null, v_task.worker_id, v_task.id);
    perform pg_notify('windlass_tasks', p_queue);
    return;
  end if;

  if v_task.status not in ('queued', 'running', 'error') then
    return;
  end if;
  if p_has_new_status and not v_is_wanted
    and windlass_internal.adopted_state(v_task.status, v_task.error_code) <> all (p_means)
  then
    perform windlass_internal.withdraw_tasks(p_adoption, array[v_task.id], format('its row was set to %s', coalesce(p_status, 'null')));
    return;
  end if;
  -- An attempt that runs keeps the payload with which it began. The next attempt gets the new one.
  update windlass.tasks t
  set payload = coalesce(p_payload, 'null'), priority = coalesce(p_priority, 0),
      queue = case v_task.status when 'running' then t.queue else p_queue end,
      run_after = case v_task.status when 'queued' then p_run_after else t.run_after end
  where t.id = v_task.id
    and (t.payload, t.priority, t.queue, t.run_after) is distinct from (
      coalesce(p_payload, 'null'), coalesce(p_priority, 0),
      case v_task.status when 'running' then t.queue else p_queue end,
      case v_task.status when 'queued' then p_run_after else t.run_after end
    );
  if found and v_task.status = 'queued' then
    perform pg_notify('windlass_tasks', p_queue);
  end if;
end
$$;
