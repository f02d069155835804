-- Workers: claim tasks and end attempts. The hot path.
--
-- Every call that ends an attempt names its claim token; a token that is no longer valid changes no row. Functions on
-- the hot path plan once and forbid sequential scans, hash joins and merge joins: their plans are made while the table
-- is small and must still be right when it has millions of rows. "Running, with this token" is written `claim_token =
-- ... and finished_at is null`, without the status. With the status the planner would consider tasks_running, which it
-- believes to be empty, and read all running tasks to find one.

-- Whether a worker may end the attempt of p_holder_id: its own; a dispatcher also those on the nodes of its fleet.
create function windlass_internal.acts_for(p_worker_id text, p_holder_id text) returns boolean
language sql stable
as $$
  select p_worker_id = p_holder_id or exists (
    select from windlass.workers d
    join windlass.workers n on n.fleet = d.fleet
    where d.id = p_worker_id and d.kind = 'dispatcher' and n.id = p_holder_id
      and n.kind = 'node'
  )
$$;

-- Attempts were ended with invalid claims. Those that repeat an accepted result (its answer was lost) are fine. Returns
-- the others: they are counted and change nothing. One update, however many there are, and one event per worker in ten
-- seconds: made-up claims must cost the database no more than a valid one. The bound is per worker, not per task,
-- because task ids are made up too. An id without a worker leaves no event: it is made up, or its worker was deleted
-- long ago.
create function windlass_internal.reject_late_results(
  p_worker_id text, p_task_ids bigint[], p_tokens uuid[], p_statuses text[]
) returns table (task_id bigint, token uuid)
language plpgsql
as $$
#variable_conflict use_column
declare
  v_task_ids bigint[];
  v_tokens uuid[];
  v_count integer;
  v_worker windlass.workers;
  v_has_event boolean;
begin
  select array_agg(f.task_id), array_agg(f.token), count(*) into v_task_ids, v_tokens, v_count
  from unnest(p_task_ids, p_tokens) as f (task_id, token)
  where not exists (
    select from windlass.tasks t
    where t.id = f.task_id and t.claim_token = f.token and t.status = any (p_statuses)
      and windlass_internal.acts_for(p_worker_id, t.worker_id)
  );
  if v_count = 0 then
    return;
  end if;
  select w.* into v_worker from windlass.workers w where w.id = p_worker_id for no key update;
  v_has_event := coalesce(
    v_worker.late_event_at between windlass.now() - interval '10 seconds' and windlass.now(), v_worker.id is null);
  update windlass.workers
  set late_results = least(late_results::bigint + v_count, 2147483647),
      late_event_at = case when v_has_event then late_event_at else windlass.now() end
  where id = p_worker_id;
  if not v_has_event then
    perform windlass_internal.add_event(
      'LATE_RESULT',
      case v_count
        when 1 then 'result rejected: its claim is no longer valid'
        else format('%s results rejected: their claims are no longer valid', v_count)
      end,
      v_worker.fleet, p_worker_id, v_task_ids[1],
      case when v_count > 1 then jsonb_build_object('count', v_count, 'task_ids', to_jsonb(v_task_ids[1:20])) end);
  end if;
  return query select * from unnest(v_task_ids, v_tokens);
end
$$;

-- The attempt succeeded. False if the claim is no longer valid: then nothing has changed.
create function windlass.complete_task(
  p_worker_id text, p_task_id bigint, p_token uuid, p_result jsonb default null, p_secret text default null
) returns boolean
language plpgsql
set enable_seqscan = off
as $$
declare
  v_task windlass.tasks;
begin
  perform windlass_internal.check_worker(p_worker_id, p_secret);
  update windlass.tasks t
  set status = 'complete', result = p_result, finished_at = windlass.now(), progress = 1, error = null, error_code = null
  where t.id = p_task_id and t.claim_token = p_token and t.finished_at is null
    and windlass_internal.acts_for(p_worker_id, t.worker_id)
  returning t.* into v_task;
  if not found then
    return not exists (
      select from windlass_internal.reject_late_results(
        p_worker_id, array[p_task_id], array[p_token], array['complete'])
    );
  end if;
  perform windlass_internal.record_attempt_span(v_task.worker_id, p_task_id, v_task.queue, v_task.started_at,
    v_task.finished_at);
  perform windlass_internal.record_successes(array[p_task_id], v_task.finished_at);
  return true;
end
$$;

-- The attempt failed. The task waits for its retry (`error`), or is `failed` if its attempts are used up or p_retry is
-- false. Returns the new status, or null if the claim is no longer valid: then nothing has changed.
create function windlass.fail_task(
  p_worker_id text,
  p_task_id bigint,
  p_token uuid,
  p_error text,
  p_code text default 'HANDLER_ERROR',
  p_retry boolean default true,
  p_jitter double precision default random(),
  p_secret text default null
) returns text
language plpgsql
set enable_seqscan = off
as $$
declare
  v_now timestamptz := windlass.now();
  v_error text := windlass_internal.truncate_error(p_error);
  v_task windlass.tasks;
  v_failed_attempts jsonb;
begin
  perform windlass_internal.check_worker(p_worker_id, p_secret);
  update windlass.tasks t
  set status = case when p_retry and t.attempts < t.max_attempts then 'error' else 'failed' end,
      run_after = case when p_retry and t.attempts < t.max_attempts
        then v_now + make_interval(
          secs => windlass_internal.retry_delay_s(t.attempts, least(greatest(p_jitter, 0), 1))) end,
      finished_at = v_now, error_code = p_code, error = v_error
  where t.id = p_task_id and t.claim_token = p_token and t.finished_at is null
    and windlass_internal.acts_for(p_worker_id, t.worker_id)
  returning t.* into v_task;
  if not found then
    if exists (
      select from windlass_internal.reject_late_results(
        p_worker_id, array[p_task_id], array[p_token], array['error', 'failed'])
    ) then
      return null;
    end if;
    return (select t.status from windlass.tasks t where t.id = p_task_id);
  end if;
  perform windlass_internal.record_attempt_span(v_task.worker_id, p_task_id, v_task.queue, v_task.started_at, v_now);
  perform windlass_internal.record_failure(v_task.worker_id, p_task_id);
  if v_task.status = 'failed' then
    v_failed_attempts := windlass_internal.failed_attempts(p_task_id, v_task.worker_id, v_task.attempts, p_code);
  end if;
  perform windlass_internal.add_event(
    case v_task.status when 'error' then 'TASK_ERROR' else 'TASK_FAILED' end,
    format('attempt %s of %s: %s', v_task.attempts, v_task.max_attempts, windlass_internal.error_headline(v_error))
      || coalesce(windlass_internal.failed_attempts_text(v_failed_attempts), ''),
    null, v_task.worker_id, p_task_id,
    jsonb_strip_nulls(jsonb_build_object(
      'attempt', v_task.attempts, 'started_at', v_task.started_at, 'error_code', p_code, 'error', v_error,
      'failed_attempts', v_failed_attempts))
  );
  return v_task.status;
end
$$;

-- release_task without the check of the caller.
create function windlass_internal.release_claim(
  p_worker_id text, p_task_id bigint, p_token uuid, p_reason text, p_delay_s double precision default 0
) returns boolean
language plpgsql
as $$
declare
  v_before windlass.tasks;
begin
  select t.* into v_before from windlass.tasks t
  where t.id = p_task_id and t.claim_token = p_token and t.finished_at is null
    and windlass_internal.acts_for(p_worker_id, t.worker_id)
  for no key update;
  if not found then
    return false;
  end if;
  update windlass.tasks
  set status = 'queued', ready_at = windlass.now(), attempts = attempts - 1, claim_token = null, worker_id = null,
      started_at = null,
      -- At most a day: a worker must not keep a task from all others.
      run_after = case when p_delay_s > 0 then windlass.now() + make_interval(secs => least(p_delay_s, 86400)) end,
      progress = null, progress_note = null
  where id = p_task_id;
  -- It does not count as an attempt, but it used the worker's time.
  perform windlass_internal.record_attempt_span(v_before.worker_id, p_task_id, v_before.queue, v_before.started_at,
    windlass.now());
  perform windlass_internal.add_event('TASK_RELEASED', p_reason, null, p_worker_id, p_task_id);
  perform pg_notify('windlass_tasks', v_before.queue);
  return true;
end
$$;

-- Return a claimed task to the queue as if it had never been claimed: the attempt does not count. It can be claimed
-- again after p_delay_s. False if the claim is no longer valid.
create function windlass.release_task(
  p_worker_id text, p_task_id bigint, p_token uuid, p_reason text, p_delay_s double precision default 0,
  p_secret text default null
) returns boolean
language plpgsql
as $$
begin
  perform windlass_internal.check_worker(p_worker_id, p_secret);
  return windlass_internal.release_claim(p_worker_id, p_task_id, p_token, p_reason, p_delay_s);
end
$$;

-- Complete tasks and claim the next ones in one round trip. A worker with a secret claims only from the queues that it
-- registered for. The three arrays belong together. Returns the new claims, and a row with is_lost for every finished
-- task whose claim was not valid. With a limit of 0 it only completes. Accepts at most 1,000 results and claims at most
-- 10,000 tasks.
--
-- Claims up to p_limit tasks: by priority, then first in, first out, per queue. Of several queues, the one whose head
-- comes first. A paused or terminating worker gets none. A worker that has terminated (error, terminated) gets is_lost
-- for its results; without results it gets an error and must stop.
create function windlass.finish_and_claim(
  p_worker_id text,
  p_task_ids bigint[],
  p_tokens uuid[],
  p_results jsonb[],
  p_queues text[],
  p_limit integer default 1,
  p_secret text default null
) returns setof windlass.claim
language plpgsql
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
  v_now timestamptz := windlass.now();
  -- A claim token has 60 random bits for this call (16 digits, one of which is always 4) and 16 digits for the task id.
  -- A random number per row would take a fifth of the time of a batch: many servers open /dev/urandom for each.
  v_random text := left(replace(gen_random_uuid()::text, '-', ''), 16);
  v_worker record;
  v_queue text;
  v_queues text[] := p_queues;
  -- One call claims no more than this: the caller repeats it.
  v_limit integer := least(p_limit, 10000);
  v_left integer := v_limit;
  v_count integer := cardinality(p_task_ids);
begin
  perform windlass_internal.check_worker(p_worker_id, p_secret);
  if v_count > 1000 then
    raise exception 'at most 1000 results are accepted in one call, not %', v_count
      using errcode = 'program_limit_exceeded';
  end if;
  if v_count > 0 and (v_count, v_count) is distinct from (cardinality(p_tokens), cardinality(p_results)) then
    raise exception 'each finished task needs a token and a result: the arrays differ in length'
      using errcode = 'invalid_parameter_value';
  end if;
  if cardinality(p_queues) > 1000 then
    raise exception 'at most 1000 queues are accepted in one call, not %', cardinality(p_queues)
      using errcode = 'program_limit_exceeded';
  end if;
  if v_count = 1 then
    update windlass.tasks t
    set status = 'complete', result = p_results[1], finished_at = v_now, progress = 1, error = null, error_code = null
    where t.id = p_task_ids[1] and t.claim_token = p_tokens[1] and t.finished_at is null
      and (t.worker_id = p_worker_id or windlass_internal.acts_for(p_worker_id, t.worker_id));
  elsif v_count > 1 then
    -- Not joined with the arrays: while statistics know few tasks, a join reads all of them for each result.
    update windlass.tasks t
    set status = 'complete', result = p_results[array_position(p_tokens, t.claim_token)], finished_at = v_now,
        progress = 1, error = null, error_code = null
    where t.id = any (p_task_ids) and t.id = p_task_ids[array_position(p_tokens, t.claim_token)]
      and t.finished_at is null
      and (t.worker_id = p_worker_id or windlass_internal.acts_for(p_worker_id, t.worker_id));
  end if;
  if v_count > 0 then
    get diagnostics v_count = row_count;
    if v_count < cardinality(p_task_ids) then
      return query
        select f.task_id, f.token, null::text, null::jsonb, null::integer, null::integer, null::double precision,
          null::integer, null::timestamptz, true
        from windlass_internal.reject_late_results(p_worker_id, p_task_ids, p_tokens, array['complete']) as f;
    end if;
  end if;
  if p_task_ids is not null and p_limit <= 0 then
    if v_count > 0 then
      perform windlass_internal.record_attempt_spans(p_task_ids, v_now);
      perform windlass_internal.record_successes(p_task_ids, v_now);
    end if;
    return;
  end if;

  select w.status, w.paused or w.status not in ('spawning', 'active') as is_barred,
    w.first_claimed_at is null as is_first,
    p_secret is null or p_queues <@ w.queues as is_served,
    -- Spans are recorded only for workers with a price. A dispatcher completes tasks of nodes, which may have one.
    w.price_micros_per_hour is not null or (w.slot is not null and w.machine_id is null) or w.kind = 'dispatcher'
      as has_price,
    w.failing_since is not null or w.kind = 'dispatcher' as is_failing,
    exists (
      select from windlass.tasks t
      where t.queue = any (p_queues) and t.run_after <= v_now
    ) as is_due
  into v_worker
  from windlass.workers w where w.id = p_worker_id;
  if not found then
    raise exception 'worker % is not registered: call windlass.register_worker first', p_worker_id
      using errcode = 'no_data_found';
  end if;
  if v_worker.has_price and v_count > 0 then
    perform windlass_internal.record_attempt_spans(p_task_ids, v_now);
  end if;
  if v_worker.is_failing and v_count > 0 then
    perform windlass_internal.record_successes(p_task_ids, v_now);
  end if;
  if v_worker.is_barred then
    if v_worker.status in ('error', 'terminated') and coalesce(cardinality(p_task_ids), 0) = 0 then
      raise exception 'worker % has terminated (%): register a new one', p_worker_id, v_worker.status
        using errcode = 'no_data_found';
    end if;
    return;
  end if;

  if not v_worker.is_served then
    raise exception 'worker % claims from queues that it did not register for', p_worker_id
      using errcode = 'invalid_parameter_value';
  end if;

  -- Make due tasks ready. Bounded: the next claims handle the rest.
  if v_worker.is_due then
    update windlass.tasks t
    set status = 'queued', run_after = null, ready_at = greatest(t.run_after, t.created_at)
    where t.id = any (array(
      select d.id from windlass.tasks d
      where d.queue = any (p_queues) and d.run_after <= v_now
      limit 1000 for update skip locked
    ));
  end if;

  if cardinality(p_queues) > 1 then
    v_queues := array(
      select q.name
      from unnest(p_queues) as q (name)
      cross join lateral (
        select t.priority, t.id from windlass.tasks t
        where t.queue = q.name and t.status = 'queued' and t.run_after is null
        order by t.priority desc, t.id limit 1
      ) as head
      order by head.priority desc, head.id
    );
  end if;

  foreach v_queue in array v_queues loop
    return query
      update windlass.tasks t
      set status = 'running', worker_id = p_worker_id, attempts = t.attempts + 1, started_at = v_now,
          finished_at = null, progress = null, progress_note = null,
          claim_token = (v_random || lpad(to_hex(t.id), 16, '0'))::uuid
      where t.id = any (array(
        select c.id from windlass.tasks c
        where c.queue = v_queue and c.status = 'queued' and c.run_after is null
        order by c.priority desc, c.id limit v_left for update skip locked
      ))
      returning t.id, t.claim_token, t.queue::text, t.payload, t.attempts, t.max_attempts::integer,
        t.timeout_s::double precision, t.priority, t.created_at, false;
    get diagnostics v_count = row_count;
    v_left := v_left - v_count;
    exit when v_left <= 0;
  end loop;

  if v_worker.is_first and v_left < v_limit then
    update windlass.workers set first_claimed_at = v_now where id = p_worker_id and first_claimed_at is null;
    -- A worker that runs tasks is active: it does not wait for the next cycle to say so.
    if v_worker.status = 'spawning' then
      perform windlass_internal.promote_worker(p_worker_id, 'claimed its first task');
    end if;
  end if;
end
$$;

-- Claim up to p_limit tasks.
create function windlass.claim_tasks(
  p_worker_id text, p_queues text[], p_limit integer default 1, p_secret text default null
) returns setof windlass.claim
language sql
as $$ select * from windlass.finish_and_claim(p_worker_id, null, null, null, p_queues, p_limit, p_secret) $$;

-- Claim one task: one row, or none.
create function windlass.claim_task(p_worker_id text, p_queues text[], p_secret text default null)
returns setof windlass.claim
language sql
as $$ select * from windlass.finish_and_claim(p_worker_id, null, null, null, p_queues, 1, p_secret) $$;

-- When the next scheduled or retrying task of these queues is due. Null if there is none.
create function windlass.next_run_after(p_queues text[]) returns timestamptz
language sql stable
as $$
  select min(due.run_after)
  from unnest(p_queues) as q (name)
  cross join lateral (
    select t.run_after from windlass.tasks t
    where t.queue = q.name and t.run_after is not null
    order by t.run_after limit 1
  ) as due
$$;
