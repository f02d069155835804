-- Adopted tables: a table of another program whose rows are tasks (docs/adopt.md).
--
-- `windlass db adopt` generates triggers and functions for each such table, in the schema windlass_adopt: they read and
-- write its columns. The rules are here. A row is wanted while its status is the one of the state `queued`; every other
-- status that Windlass did not write itself withdraws the task. In the other direction each change of a task is written
-- into its row, in the same transaction.
--
-- Locks. A change of a row locks the row and then its task; a change of a task locks the task and then its row. So that
-- these orders cannot deadlock, neither waits for the other: a row or task that another transaction has locked is
-- skipped and recorded in deferred_rows, and settle_rows handles it later. A task is inserted only by a transaction that
-- holds its row.

-- The adopted tables.
create table windlass.adoptions (
  name windlass.name primary key check (length(name) <= 30),
  table_schema text not null,
  table_name text not null,
  -- The status of a row for each state of its task: {"queued", "running", "retrying", "complete", "failed", "cancelled"}.
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
  -- The status of the row before the change that could not be written. A row that still has it is behind its task. Null:
  -- the owner of the row changed its status, and the task must follow.
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
-- plain SET in them outlives their function. A changed setting raises, which undoes the change with the write.
create function windlass_internal.session_settings() returns text[]
language sql
as $$
  select array[
    current_setting('search_path'), coalesce(current_setting('windlass.now', true), ''),
    coalesce(current_setting('windlass.actor', true), ''), coalesce(current_setting('windlass.withdraws', true), '')
  ]
$$;

create function windlass_internal.check_session_settings(p_before text[]) returns void
language plpgsql
as $$
begin
  if windlass_internal.session_settings() <> p_before then
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


-- -------------------------------------------------------------------------------- differences and their repair

-- Bring one row and its task together. False if one of them is locked. Raises what the table raises. p_is_owners: the
-- owner changed the row's status. p_expected: statuses that the row had before changes which could not be written.
create function windlass_internal.settle_row(
  p_adoption text, p_key text, p_is_owners boolean, p_expected text[]
) returns boolean
language plpgsql
as $$
declare
  v_task windlass.tasks;
  v_has_task boolean;
  v_row record;
  v_outcome text;
  v_status text;
  v_settings text[] := windlass_internal.session_settings();
begin
  select t.* into v_task from windlass.tasks t
  where t.adoption = p_adoption and t.unique_key = p_key and t.adoption is not null
  for no key update skip locked;
  v_has_task := found;
  if not v_has_task and exists (select from windlass.tasks t where t.adoption = p_adoption and t.unique_key = p_key) then
    return false;
  end if;
  execute format('select * from windlass_adopt.%I($1)', p_adoption || '_rows') into v_row using array[p_key];
  perform windlass_internal.check_session_settings(v_settings);
  if v_row.row_key is null then
    if v_has_task and v_task.status in ('queued', 'running', 'error') then
      perform windlass_internal.withdraw_tasks(p_adoption, array[v_task.id], 'its row was deleted');
    end if;
    return true;
  end if;
  if not v_row.is_held then
    return false;
  end if;

  if v_has_task and not p_is_owners and v_row.row_status = any (p_expected) then
    perform windlass_internal.adopt_row(p_adoption, p_key, v_row.row_status, v_row.means, false, v_row.queue,
      v_row.payload, v_row.priority, v_row.run_after, v_row.owner);
    select a.states ->> windlass_internal.adopted_state(v_task.status, v_task.error_code) into v_status
    from windlass.adoptions a where a.name = p_adoption;
    execute format('select windlass_adopt.%I($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)', p_adoption || '_write')
    into v_outcome
    using p_key, array[v_row.row_status], v_status, v_task.attempts, v_task.worker_id, v_task.started_at,
      v_task.finished_at, v_task.progress, v_task.result, v_task.error_code::text, v_task.error;
    perform windlass_internal.check_session_settings(v_settings);
    return v_outcome = 'written';
  end if;
  perform windlass_internal.adopt_row(p_adoption, p_key, v_row.row_status, v_row.means, true, v_row.queue,
    v_row.payload, v_row.priority, v_row.run_after, v_row.owner);
  return true;
end
$$;

-- Settle deferred rows that are due, at most p_limit; all of them if p_is_forced. Workers call it with their
-- maintenance, and the control loop after its cycles, each as a statement of its own: triggers of the table's owner run
-- in it. Returns how many were settled. A row that its table refuses again is tried later, after up to 15 minutes.
--
-- No row is begun after p_max_s. A statement timeout interrupts the row that takes too long, which counts as refused, and
-- ends the call. So does a lock on the whole table: the rows behind it would wait as long.
create function windlass_internal.settle_rows(
  p_adoption text default null, p_limit integer default 100, p_is_forced boolean default false,
  p_max_s double precision default 2
) returns integer
language plpgsql
set lock_timeout = '1s'
as $$
declare
  v_due record;
  v_all record;
  v_error text;
  v_is_settled boolean;
  v_settled integer := 0;
  v_is_cancelled boolean := false;
  v_give_up_at timestamptz := clock_timestamp() + make_interval(secs => p_max_s);
begin
  for v_due in
    select d.id, d.adoption, d.row_key, d.attempts from windlass.deferred_rows d
    where (p_is_forced or d.retry_at <= windlass.now()) and (p_adoption is null or d.adoption = p_adoption)
    order by d.retry_at limit p_limit for update skip locked
  loop
    select array_agg(d.id) as ids, bool_or(d.expected is null) as is_owners, array_agg(d.expected) as expected
    into v_all
    from windlass.deferred_rows d where d.adoption = v_due.adoption and d.row_key = v_due.row_key;
    -- Another entry of the same row may have settled it.
    continue when v_all.ids is null;
    v_error := null;
    begin
      v_is_settled := windlass_internal.settle_row(v_due.adoption, v_due.row_key, v_all.is_owners, v_all.expected);
    exception
      when lock_not_available then
        exit;
      when query_canceled then
        v_is_settled := false;
        v_is_cancelled := true;
        v_error := 'writing its row took too long';
      when others then
        v_is_settled := false;
        v_error := left(sqlerrm, 500);
    end;
    if v_is_settled then
      delete from windlass.deferred_rows where id = any (array(
        select d.id from windlass.deferred_rows d where d.id = any (v_all.ids) for update skip locked
      ));
      v_settled := v_settled + 1;
    else
      update windlass.deferred_rows d
      set reason = coalesce(v_error, d.reason), attempts = d.attempts + 1,
          is_rejected = d.is_rejected or v_error is not null,
          -- Locks are short. An error lasts until a person has fixed its cause.
          retry_at = windlass.now() + make_interval(secs => case
            when v_error is null then 1
            else windlass_internal.retry_delay_s(d.attempts + 1, random())
          end)
      where d.id = v_due.id;
    end if;
    exit when v_is_cancelled or clock_timestamp() >= v_give_up_at;
  end loop;
  return v_settled;
end
$$;

-- The same for workers. Call it with a statement timeout.
create function windlass.settle_rows(p_worker_id text, p_secret text default null) returns integer
language plpgsql
as $$
begin
  perform windlass_internal.check_worker(p_worker_id, p_secret);
  return windlass_internal.settle_rows();
end
$$;

-- Where an adopted table and its tasks differ: a wanted row without a task, a row with another status than its task, a
-- task that no wanted row belongs to. Rows that the owner runs by other means (running, without a task) are no
-- difference. is_deferred: settle_rows will handle it.
create function windlass_internal.compare_rows(p_adoption text)
returns table (row_key text, difference text, row_status text, task_status text, is_deferred boolean)
language plpgsql stable
as $$
declare
  v_settings text[] := windlass_internal.session_settings();
begin
  return query execute format(
    $query$
      with rows as materialized (
        select r.row_key, r.row_status from windlass_adopt.%I() as r
      ),
      states as (
        select a.states from windlass.adoptions a where a.name = $1
      ),
      differing as (
        select r.row_key,
          case when t.id is null then 'no task' else 'status' end as difference, r.row_status, t.status::text as task_status
        from rows r
        cross join states s
        left join windlass.tasks t on t.adoption = $1 and t.unique_key = r.row_key
        where case
          when t.id is null then r.row_status = s.states ->> 'queued'
          -- The owner took the row back, and runs it.
          when t.error_code = 'CANCELLED' and t.status = 'failed' then r.row_status = s.states ->> 'queued'
          else r.row_status <> s.states ->> windlass_internal.adopted_state(t.status, t.error_code)
        end
        union all
        select t.unique_key, 'no row', null, t.status from windlass.tasks t
        where t.adoption = $1 and t.status in ('queued', 'running', 'error')
          and not exists (select from rows r where r.row_key = t.unique_key)
      )
      select d.row_key, d.difference, d.row_status, d.task_status, windlass_internal.is_deferred($1, d.row_key)
      from differing d
    $query$, p_adoption || '_active') using p_adoption;
  perform windlass_internal.check_session_settings(v_settings);
end
$$;

-- Record the differences for settle_rows and return their number. A task that is complete is never run again: its row
-- gets the result. A queued row whose task runs gets the running status. Otherwise the row decides: a row with the
-- running status may be under work by its owner, so its task is withdrawn. A failed task and a row that is not queued
-- stay as they are: neither runs, and only the owner knows the outcome of the row.
create function windlass_internal.defer_differences(p_adoption text) returns integer
language plpgsql
as $$
declare
  v_queued text := (select a.states ->> 'queued' from windlass.adoptions a where a.name = p_adoption);
  v_count integer;
begin
  insert into windlass.deferred_rows (adoption, row_key, expected, reason)
  select p_adoption, d.row_key,
    case
      when d.task_status = 'complete' or d.task_status = 'running' and d.row_status = v_queued then d.row_status
      -- A task that a trigger has enqueued since then may run.
      when d.difference = 'no task' then d.row_status
    end,
    'found by doctor'
  from windlass_internal.compare_rows(p_adoption) as d
  where not d.is_deferred
    and (d.task_status is distinct from 'failed' or d.row_status = v_queued);
  get diagnostics v_count = row_count;
  return v_count;
end
$$;


-- ------------------------------------------------------------------------------------------ backfill, removal

-- Adopt one row that cannot be inserted with its batch: it has a task, or is refused. A refused row is deferred.
create function windlass_internal.backfill_row(p_adoption text, p_key text, p_queued text) returns void
language plpgsql
as $$
declare
  v_row record;
  v_settings text[] := windlass_internal.session_settings();
begin
  execute format('select * from windlass_adopt.%I($1)', p_adoption || '_rows') into v_row using array[p_key];
  perform windlass_internal.check_session_settings(v_settings);
  if not v_row.is_held then
    perform windlass_internal.defer_row(p_adoption, p_key, p_queued, 'its row was locked');
  elsif 'queued' = any (v_row.means) and not exists (
    select from windlass.tasks t
    where t.adoption = p_adoption and t.unique_key = p_key and t.status in ('queued', 'running', 'error')
  ) then
    perform windlass_internal.adopt_row(p_adoption, p_key, v_row.row_status, v_row.means, true, v_row.queue,
      v_row.payload, v_row.priority, v_row.run_after, v_row.owner);
  end if;
exception
  when others then
    perform windlass_internal.defer_row(p_adoption, p_key, p_queued, sqlerrm, p_is_rejected => true);
end
$$;

-- Adopt the next p_limit rows that were queued before the table was adopted. The position is stored in the same
-- transaction, so a backfill that was killed continues where it ended, and concurrent ones take turns. Returns the number
-- of rows so far, and whether all are done.
create function windlass_internal.backfill_rows(
  p_adoption text, p_limit integer default 1000, out backfilled bigint, out is_finished boolean
)
language plpgsql
as $$
declare
  v_adoption windlass.adoptions;
  v_keys text[];
  v_after jsonb;
  v_single text[];
  v_settings text[] := windlass_internal.session_settings();
begin
  select a.* into v_adoption from windlass.adoptions a where a.name = p_adoption for no key update;
  if not found then
    raise exception '% is not adopted: run `windlass db adopt % --apply` first', p_adoption, p_adoption
      using errcode = 'no_data_found';
  end if;
  backfilled := v_adoption.backfilled;
  is_finished := v_adoption.backfilled_at is not null;
  if is_finished then
    return;
  end if;
  execute format(
    'select array_agg(n.row_key), (array_agg(n.place))[count(*)] from windlass_adopt.%I($1, $2) as n',
    p_adoption || '_next')
  into v_keys, v_after using v_adoption.backfill_after, least(p_limit, 10000);
  perform windlass_internal.check_session_settings(v_settings);
  if v_keys is null then
    is_finished := true;
    update windlass.adoptions a set backfilled_at = windlass.now() where a.name = p_adoption;
    return;
  end if;

  begin
    execute format(
      $query$
        with found as materialized (
          select * from windlass_adopt.%I($1)
        ),
        added as (
          insert into windlass.tasks (
            queue, payload, priority, run_after, max_attempts, timeout_s, unique_key, adoption, owner
          )
          select f.queue, coalesce(f.payload, 'null'), coalesce(f.priority, 0), f.run_after, $3, $4, f.row_key, $2, f.owner
          from found f
          where f.is_held and 'queued' = any (f.means)
            and windlass_internal.row_refusal($2, f.row_key, f.payload) is null
            and not exists (select from windlass.tasks t where t.adoption = $2 and t.unique_key = f.row_key)
          returning unique_key
        )
        select array_agg(f.row_key) from found f
        where not f.is_held or 'queued' = any (f.means) and f.row_key not in (select a.unique_key from added a)
      $query$, p_adoption || '_rows')
    into v_single using v_keys, p_adoption, v_adoption.max_attempts::integer, v_adoption.timeout_s::double precision;
    perform windlass_internal.check_session_settings(v_settings);
  exception
    -- A row of the batch has a value that cannot be read or stored. Find it.
    when others then
      v_single := v_keys;
  end;
  -- The row is locked, refused, or has a task: a trigger was faster, or the table was adopted before. If the transaction
  -- that has locked a row leaves its status as it is, no trigger reports the row.
  perform windlass_internal.backfill_row(p_adoption, k.row_key, v_adoption.states ->> 'queued')
  from unnest(v_single) as k (row_key);
  update windlass.adoptions a
  set backfill_after = v_after, backfilled = a.backfilled + cardinality(v_keys)
  where a.name = p_adoption
  returning a.backfilled into backfilled;
end
$$;

-- Give up to p_limit rows with unfinished tasks back to their owner: the row is queued again, its task is cancelled, and
-- a running attempt loses its claim. Returns how many tasks were withdrawn, and how many rows were queued: a row that is
-- missing, or that refuses to be written, stays as it is. Locked rows are left to the next call.
create function windlass_internal.release_rows(
  p_adoption text, p_limit integer default 1000, out withdrawn integer, out queued integer
)
language plpgsql
as $$
declare
  v_task windlass.tasks;
  v_states jsonb := (select a.states from windlass.adoptions a where a.name = p_adoption);
  v_settings text[] := windlass_internal.session_settings();
  v_outcome text;
begin
  withdrawn := 0;
  queued := 0;
  for v_task in
    select t.* from windlass.tasks t
    where t.adoption = p_adoption and t.status in ('queued', 'running', 'error')
    order by t.id limit p_limit for no key update skip locked
  loop
    begin
      execute format(
        'select windlass_adopt.%I($1, $2, $3, 0, null, null, null, null, null, null, null)', p_adoption || '_write')
      into v_outcome
      using v_task.unique_key,
        array[v_states ->> 'queued', v_states ->> windlass_internal.adopted_state(v_task.status, v_task.error_code)],
        v_states ->> 'queued';
      perform windlass_internal.check_session_settings(v_settings);
    exception
      when lock_not_available then
        exit;
      when others then
        v_outcome := 'rejected';
    end;
    continue when v_outcome = 'locked';
    perform windlass_internal.withdraw_tasks(p_adoption, array[v_task.id], 'its table is no longer adopted');
    withdrawn := withdrawn + 1;
    queued := queued + case v_outcome when 'written' then 1 else 0 end;
  end loop;
end
$$;
