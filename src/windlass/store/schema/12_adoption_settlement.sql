-- Differences between rows of adopted tables and their tasks, and their repair (12_adoption.sql).

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
-- No row is begun after p_max_s. A statement timeout interrupts the row that takes too long, which counts as refused,
-- and ends the call. So does a lock on the whole table: the rows behind it would wait as long.
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
