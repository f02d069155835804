-- Rows of a table that is adopted, and of one that is no longer (12_adoption.sql).

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
  -- A worker whose changes of this row are deferred, because the backfill holds it, may have finished the task.
  elsif 'queued' = any (v_row.means) and not windlass_internal.is_deferred(p_adoption, p_key) and not exists (
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
-- transaction, so a backfill that was killed continues where it ended, and concurrent ones take turns. Returns the
-- number of rows so far, and whether all are done.
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
  -- The row is locked, refused, or has a task: a trigger was faster, or the table was adopted before. If the
  -- transaction that has locked a row leaves its status as it is, no trigger reports the row.
  perform windlass_internal.backfill_row(p_adoption, k.row_key, v_adoption.states ->> 'queued')
  from unnest(v_single) as k (row_key);
  update windlass.adoptions a
  set backfill_after = v_after, backfilled = a.backfilled + cardinality(v_keys)
  where a.name = p_adoption
  returning a.backfilled into backfilled;
end
$$;

-- Give up to p_limit rows with unfinished tasks back to their owner: the row is queued again, its task is cancelled,
-- and a running attempt loses its claim. Returns how many tasks were withdrawn, and how many rows were queued: a row
-- that is missing, or that refuses to be written, stays as it is. Locked rows are left to the next call.
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
