-- The public contract. A worker or a producer in any language needs these functions and nothing else.
--
--   producers   enqueue, retry_task, retry_failed, cancel_task
--   workers     register_worker, activate_worker, claim_task(s), complete_task, fail_task, finish_and_claim,
--               release_task, heartbeat, leave
--   upkeep      requeue_tasks_of, recover_lost_workers, sweep
--
-- Whoever finishes, fails or beats names the claim token; one that is no longer valid touches no row.
-- Functions on the hot path plan once and forbid sequential scans, hash and merge joins: their plans are made while the
-- table is small and must still be right when it holds millions of rows.
--
-- "Running, with this token" is written `claim_token = ... and finished_at is null`, not with the status: that would
-- offer the planner tasks_running, which it believes empty, and one task is found by reading all that run.

create type windlass.claim as (
  task_id bigint,
  token uuid,
  queue text,
  payload jsonb,
  attempt integer,
  max_attempts integer,
  timeout_s double precision,
  priority integer,
  created_at timestamptz,
  -- Only finish_and_claim sets this: the row names a finished task whose claim was no longer valid.
  is_lost boolean
);

-- An error as an event tells it: its beginning says what happened, its end where.
create function windlass_internal.truncate_for_event(p_error text) returns text
language sql immutable parallel safe
as $$
  select case
    when length(p_error) <= 300 then p_error
    else left(split_part(p_error, e'\n', 1), 100) || ' ... ' || right(p_error, 200)
  end
$$;

-- An error as it is kept: 8,000 characters hold a long traceback. Of more than that both ends: what kind it is stands at
-- the beginning of a message, and the cause at the end of a traceback.
create function windlass_internal.truncate_error(p_error text) returns text
language sql immutable parallel safe
as $$
  select case
    when length(p_error) <= 8000 then p_error
    else left(p_error, 2000) || ' ... ' || right(p_error, 5995)
  end
$$;

create function windlass_internal.add_event(
  p_code text, p_reason text, p_fleet text, p_worker_id text, p_task_id bigint, p_detail jsonb default null
) returns void
language sql
as $$
  insert into windlass.events (code, reason, fleet, worker_id, task_id, detail)
  values (p_code, p_reason, p_fleet, p_worker_id, p_task_id, p_detail)
$$;

-- Seconds to wait before attempt number p_attempts + 1: doubling from 5 s to at most 15 min, of which a random
-- half is left out so that tasks that failed together do not come back together. Same formula: policy/backoff.py.
create function windlass_internal.retry_delay_s(p_attempts integer, p_jitter double precision) returns double precision
language sql immutable parallel safe
as $$
  select least(5.0 * power(2.0, least(greatest(p_attempts, 1), 30) - 1), 900.0) * (1.0 - 0.5 * p_jitter)
$$;


-- Write down that an attempt ended on a worker whose time has a price, or whose price is not known yet; for all others
-- nothing is written. The ledger needs it, since a task's row only remembers its last attempt.
create function windlass_internal.record_attempt_span(
  p_worker_id text, p_task_id bigint, p_queue text, p_from_at timestamptz, p_until_at timestamptz
) returns void
language sql
as $$
  insert into windlass.attempt_spans (worker_id, task_id, queue, from_at, until_at)
  select p_worker_id, p_task_id, p_queue, p_from_at, p_until_at
  from windlass.workers w
  where w.id = p_worker_id
    and (w.price_micros_per_hour is not null or (w.slot is not null and w.machine_id is null))
    and p_from_at < p_until_at
  on conflict do nothing
$$;


-- ------------------------------------------------------------------------------------------------- producers

-- Wakes idle workers, whoever inserts and however: enqueue(), plain INSERT or COPY. One notification a queue and
-- transaction. It is a hint; workers poll as well.
create function windlass_internal.notify_tasks() returns trigger
language plpgsql
as $$
begin
  perform pg_notify('windlass_tasks', q.queue) from (select distinct queue from inserted) q;
  return null;
end
$$;

create trigger announce_tasks
  after insert on windlass.tasks
  referencing new table as inserted
  for each statement execute function windlass_internal.notify_tasks();

-- Adds one task and returns its id, in the caller's own transaction. With a unique key that is already there, the
-- id of the task that has it, unchanged.
create function windlass.enqueue(
  p_queue text,
  p_payload jsonb default 'null',
  p_priority integer default 0,
  p_run_after timestamptz default null,
  p_max_attempts integer default 3,
  p_timeout_s double precision default null,
  p_unique_key text default null,
  p_max_payload_bytes integer default 1048576
) returns bigint
language plpgsql
as $$
declare
  v_id bigint;
begin
  if octet_length(p_payload::text) > p_max_payload_bytes then
    raise exception 'the payload has % bytes and at most % are accepted: keep large data elsewhere and put its address into the task',
      octet_length(p_payload::text), p_max_payload_bytes
      using errcode = 'program_limit_exceeded';
  end if;

  -- The task that has the key may be deleted between our insert and our look for it. Ten times in a row is no chance.
  for v_round in 1..10 loop
    insert into windlass.tasks (queue, payload, priority, run_after, max_attempts, timeout_s, unique_key)
    values (p_queue, p_payload, p_priority, p_run_after, p_max_attempts, p_timeout_s, p_unique_key)
    on conflict (queue, unique_key) where unique_key is not null do nothing
    returning id into v_id;
    if v_id is not null then
      return v_id;
    end if;

    select t.id into v_id
    from windlass.tasks t
    where t.queue = p_queue
      and t.unique_key = p_unique_key;
    if v_id is not null then
      return v_id;
    end if;
  end loop;
  raise exception 'the task with key % comes and goes: ask again', p_unique_key
    using errcode = 'serialization_failure';
end
$$;

-- Puts a failed (or waiting) task back at its old place in the queue with all its attempts before it. True if it did.
create function windlass.retry_task(p_task_id bigint) returns boolean
language plpgsql
as $$
declare
  v_queue text;
begin
  update windlass.tasks
  set status = 'queued', run_after = null, ready_at = windlass.now(), attempts = 0, claim_token = null, worker_id = null,
      started_at = null, finished_at = null, progress = null, progress_note = null
  where id = p_task_id
    and status in ('error', 'failed')
  returning queue into v_queue;
  if not found then
    return false;
  end if;
  perform windlass_internal.add_event('TASK_RETRIED', 'put back into the queue by hand', null, null, p_task_id);
  perform pg_notify('windlass_tasks', v_queue);
  return true;
end
$$;

-- Does the same with the dead letters of a queue, at most p_limit of them, oldest first, and returns them with the time
-- at which each had failed: a caller goes on until none is left, with the latest of those times as p_failed_from, so that
-- the dead letters of other queues are passed over once and not in every round. One that failed after p_failed_before
-- stays: with the time at which the caller began, a task that fails again at once is not retried for ever. One that was
-- cancelled did not fail: somebody did not want it. Served by tasks_failed.
create function windlass.retry_failed(
  p_queue text,
  p_limit integer default 1000,
  p_failed_before timestamptz default windlass.now(),
  p_include_cancelled boolean default false,
  p_failed_from timestamptz default null
) returns table (task_id bigint, failed_at timestamptz)
language plpgsql
set enable_seqscan = off
as $$
#variable_conflict use_column
begin
  return query
    with dead as (
      select f.id, f.finished_at
      from windlass.tasks f
      where f.status = 'failed'
        and f.finished_at between coalesce(p_failed_from, '-infinity') and p_failed_before
        and f.queue = p_queue
        and (p_include_cancelled or f.error_code is distinct from 'CANCELLED')
      order by f.finished_at
      limit p_limit
      for update skip locked
    ),
    retried as (
      update windlass.tasks t
      set status = 'queued', run_after = null, ready_at = windlass.now(), attempts = 0, claim_token = null, worker_id = null,
          started_at = null, finished_at = null, progress = null, progress_note = null
      where t.id = any (array(select d.id from dead d))
      returning t.id
    ),
    noted as (
      insert into windlass.events (code, reason, task_id)
      select 'TASK_RETRIED', 'put back into the queue by hand', r.id from retried r
    )
    select r.id, d.finished_at from retried r join dead d on d.id = r.id order by r.id;
  if found then
    perform pg_notify('windlass_tasks', p_queue);
  end if;
end
$$;

-- Ends a task that is not finished as failed, code CANCELLED. A running one loses its claim: its worker learns it
-- from the next heartbeat and stops. True if it did.
create function windlass.cancel_task(p_task_id bigint, p_reason text default 'cancelled by hand') returns boolean
language plpgsql
as $$
declare
  v_before windlass.tasks;
begin
  select t.* into v_before
  from windlass.tasks t
  where t.id = p_task_id
    and t.status in ('queued', 'running', 'error')
  for no key update;
  if not found then
    return false;
  end if;
  update windlass.tasks
  set status = 'failed', run_after = null, error_code = 'CANCELLED', error = p_reason,
      claim_token = null, finished_at = windlass.now()
  where id = p_task_id;
  if v_before.status = 'running' then
    perform windlass_internal.record_attempt_span(v_before.worker_id, p_task_id, v_before.queue, v_before.started_at, windlass.now());
  end if;
  perform windlass_internal.add_event('TASK_CANCELLED', p_reason, null, v_before.worker_id, p_task_id);
  return true;
end
$$;


-- --------------------------------------------------------------------------------------------------- workers

-- A worker announces itself. One that was hired finds the row of its intent and keeps fleet, slot and status; one
-- started by hand gets a row without a slot, active at once. An id that has ended stays ended: returns its status.
--
-- A program that was started again under its id (by a service, in a container) holds nothing: what its last start had
-- claimed is requeued, and the attempt counts, for it may be what killed it. The same p_start_id says that it is the same
-- program, whose call was late or came twice; without one, every call is a new start.
create function windlass.register_worker(
  p_worker_id text,
  p_fleet text default 'default',
  p_queues text[] default '{}',
  p_concurrency integer default 1,
  p_lease_s double precision default 30,
  p_host text default null,
  p_pid integer default null,
  p_version text default null,
  p_kind text default 'worker',
  p_start_id text default null
) returns text
language plpgsql
as $$
declare
  v_status text;
  v_fleet text;
  -- Null of one that nobody has heard of: then there is nothing to look for.
  v_is_new_start boolean;
begin
  select (w.start_id = p_start_id) is not true into v_is_new_start
  from windlass.workers w
  where w.id = p_worker_id
  for no key update;

  insert into windlass.fleets (name) values (p_fleet) on conflict do nothing;

  insert into windlass.workers as w (
    id, fleet, status, paused, queues, kind, concurrency, lease_s, activated_at, host, pid, version, start_id
  )
  select p_worker_id, p_fleet, 'active', f.paused, p_queues, p_kind, p_concurrency, p_lease_s, windlass.now(), p_host, p_pid,
    p_version, p_start_id
  from windlass.fleets f
  where f.name = p_fleet
  on conflict (id) do update
    set queues = excluded.queues, kind = excluded.kind, concurrency = excluded.concurrency, lease_s = excluded.lease_s,
        host = excluded.host, pid = excluded.pid, version = excluded.version, start_id = excluded.start_id
    where w.status in ('spawning', 'active', 'terminating')
  returning w.status, w.fleet into v_status, v_fleet;

  if v_status is null then
    select w.status into v_status from windlass.workers w where w.id = p_worker_id;
  else
    perform windlass_internal.add_event('WORKER_REGISTERED', format('registered on %s, serving %s', coalesce(p_host, 'an unknown host'),
      array_to_string(p_queues, ', ')), v_fleet, p_worker_id, null);
    -- What runs on nodes outlives the start of a dispatcher, and of the node's own program.
    if p_kind = 'worker' and v_is_new_start then
      perform windlass_internal.requeue_tasks_of(array[p_worker_id], 'WORKER_LOST', 'its worker was started again');
    end if;
  end if;
  return v_status;
end
$$;

-- A spawning worker says that it is ready for work. Returns its status.
create function windlass.activate_worker(p_worker_id text) returns text
language plpgsql
as $$
declare
  v_worker windlass.workers;
begin
  update windlass.workers
  set status = 'active', activated_at = windlass.now()
  where id = p_worker_id
    and status = 'spawning'
  returning * into v_worker;
  if found then
    perform windlass_internal.add_event('WORKER_ACTIVATED', 'the worker reported that it is ready', v_worker.fleet, p_worker_id, null);
    return 'active';
  end if;
  return (select w.status from windlass.workers w where w.id = p_worker_id);
end
$$;

-- A finish or failure came with a claim that is no longer valid. True if it only repeats what was accepted before
-- (the answer was lost on its way); otherwise it changes nothing and is counted.
create function windlass_internal.is_duplicate_completion(
  p_worker_id text, p_task_id bigint, p_token uuid, p_statuses text[]
) returns boolean
language plpgsql
as $$
begin
  if exists (
    select from windlass.tasks t
    where t.id = p_task_id
      and t.claim_token = p_token
      and t.status = any (p_statuses)
  ) then
    return true;
  end if;
  update windlass.workers set late_results = late_results + 1 where id = p_worker_id;
  perform windlass_internal.add_event('LATE_RESULT', 'a result came after its claim was lost; it changed nothing', w.fleet, p_worker_id, p_task_id)
  from (select (select fleet from windlass.workers where id = p_worker_id) as fleet) w;
  return false;
end
$$;

-- The attempt named by the token succeeded. False if the claim is no longer valid: then nothing has changed.
create function windlass.complete_task(p_worker_id text, p_task_id bigint, p_token uuid, p_result jsonb default null)
returns boolean
language plpgsql
set enable_seqscan = off
as $$
declare
  v_task windlass.tasks;
begin
  update windlass.tasks t
  set status = 'complete', result = p_result, finished_at = windlass.now(), error = null, error_code = null
  where t.id = p_task_id
    and t.claim_token = p_token
    and t.finished_at is null
  returning t.* into v_task;
  if not found then
    return windlass_internal.is_duplicate_completion(p_worker_id, p_task_id, p_token, array['complete']);
  end if;
  perform windlass_internal.record_attempt_span(v_task.worker_id, p_task_id, v_task.queue, v_task.started_at, v_task.finished_at);
  perform windlass_internal.record_successes(array[p_task_id], v_task.finished_at);
  return true;
end
$$;

-- The attempt failed. It waits as `error` for its retry, or ends as `failed` when attempts are used up or p_retry is
-- false. Returns the task's new status, or null if the claim is no longer valid: then nothing has changed.
create function windlass.fail_task(
  p_worker_id text,
  p_task_id bigint,
  p_token uuid,
  p_error text,
  p_code text default 'HANDLER_ERROR',
  p_retry boolean default true,
  p_jitter double precision default random()
) returns text
language plpgsql
set enable_seqscan = off
as $$
declare
  v_now timestamptz := windlass.now();
  v_error text := windlass_internal.truncate_error(p_error);
  v_task windlass.tasks;
  v_failed_on jsonb;
begin
  update windlass.tasks t
  set status = case when p_retry and t.attempts < t.max_attempts then 'error' else 'failed' end,
      run_after = case when p_retry and t.attempts < t.max_attempts
        then v_now + make_interval(secs => windlass_internal.retry_delay_s(t.attempts, p_jitter)) end,
      finished_at = v_now, error_code = p_code, error = v_error
  where t.id = p_task_id
    and t.claim_token = p_token
    and t.finished_at is null
  returning t.* into v_task;
  if not found then
    if windlass_internal.is_duplicate_completion(p_worker_id, p_task_id, p_token, array['error', 'failed']) then
      return (select t.status from windlass.tasks t where t.id = p_task_id);
    end if;
    return null;
  end if;
  perform windlass_internal.record_attempt_span(v_task.worker_id, p_task_id, v_task.queue, v_task.started_at, v_now);
  perform windlass_internal.record_failure(v_task.worker_id, p_task_id);
  if v_task.status = 'failed' then
    v_failed_on := windlass_internal.failed_attempts(p_task_id, v_task.worker_id, v_task.attempts, p_code);
  end if;
  perform windlass_internal.add_event(
    case v_task.status when 'error' then 'TASK_ERROR' else 'TASK_FAILED' end,
    format('attempt %s of %s: %s', v_task.attempts, v_task.max_attempts, windlass_internal.truncate_for_event(v_error))
      || coalesce(windlass_internal.failed_attempts_text(v_failed_on), ''),
    null, v_task.worker_id, p_task_id,
    jsonb_strip_nulls(jsonb_build_object(
      'attempt', v_task.attempts, 'error_code', p_code, 'error', v_error, 'failed_attempts', v_failed_on))
  );
  return v_task.status;
end
$$;

-- Gives a claimed task back as if it had never been taken: the attempt does not count. Nobody gets it before the delay is
-- over. False if the claim is lost.
create function windlass.release_task(
  p_worker_id text, p_task_id bigint, p_token uuid, p_reason text, p_delay_s double precision default 0
) returns boolean
language plpgsql
as $$
declare
  v_before windlass.tasks;
begin
  select t.* into v_before
  from windlass.tasks t
  where t.id = p_task_id
    and t.claim_token = p_token
    and t.finished_at is null
  for no key update;
  if not found then
    return false;
  end if;
  update windlass.tasks
  set status = 'queued', ready_at = windlass.now(), attempts = attempts - 1, claim_token = null, worker_id = null,
      started_at = null,
      run_after = case when p_delay_s > 0 then windlass.now() + make_interval(secs => p_delay_s) end,
      progress = null, progress_note = null
  where id = p_task_id;
  -- It does not count as an attempt, but it took the worker's time.
  perform windlass_internal.record_attempt_span(v_before.worker_id, p_task_id, v_before.queue, v_before.started_at, windlass.now());
  perform windlass_internal.add_event('TASK_RELEASED', p_reason, null, p_worker_id, p_task_id);
  perform pg_notify('windlass_tasks', v_before.queue);
  return true;
end
$$;

-- The attempts that are completed now, as spans of the workers they ran on, where their time has a price.
create function windlass_internal.record_attempt_spans(p_task_ids bigint[], p_until_at timestamptz) returns void
language sql
as $$
  insert into windlass.attempt_spans (worker_id, task_id, queue, from_at, until_at)
  select t.worker_id, t.id, t.queue, t.started_at, p_until_at
  from windlass.tasks t
  join windlass.workers w on w.id = t.worker_id
  where (w.price_micros_per_hour is not null or (w.slot is not null and w.machine_id is null))
    and t.id = any (p_task_ids)
    and t.status = 'complete'
    and t.finished_at = p_until_at
    and t.started_at < p_until_at
  on conflict do nothing
$$;

-- Completes what is done and claims what is next in one round trip. The three arrays go together. Returns the new
-- claims, and a row with is_lost for every finished task whose claim was no longer valid. With a limit of 0 it only
-- completes.
--
-- Up to p_limit tasks are claimed: first in, first out within priority, per queue; among several queues the one whose
-- head comes first. None for a worker that is paused or terminating. One that has ended (error, terminated) hears that
-- its results come too late, and with nothing to deliver it gets an error: it must stop, whatever its heartbeat knows.
create function windlass.finish_and_claim(
  p_worker_id text,
  p_task_ids bigint[],
  p_tokens uuid[],
  p_results jsonb[],
  p_queues text[],
  p_limit integer default 1
) returns setof windlass.claim
language plpgsql
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
  v_now timestamptz := windlass.now();
  -- A claim token is 60 bits of chance for this call (16 digits, one of which is always 4) and 16 digits for the task. A
  -- random number for each row instead would be a fifth of the time of a batch: many servers open /dev/urandom for each.
  v_chance text := left(replace(gen_random_uuid()::text, '-', ''), 16);
  v_worker record;
  v_queue text;
  v_queues text[] := p_queues;
  v_left integer := p_limit;
  v_count integer := cardinality(p_task_ids);
begin
  if v_count = 1 then
    update windlass.tasks t
    set status = 'complete', result = p_results[1], finished_at = v_now, error = null, error_code = null
    where t.id = p_task_ids[1]
      and t.claim_token = p_tokens[1]
      and t.finished_at is null;
  elsif v_count > 1 then
    update windlass.tasks t
    set status = 'complete', result = f.result, finished_at = v_now, error = null, error_code = null
    from unnest(p_task_ids, p_tokens, p_results) as f (task_id, token, result)
    where t.id = f.task_id
      and t.claim_token = f.token
      and t.finished_at is null;
  end if;
  if v_count > 0 then
    get diagnostics v_count = row_count;
    if v_count < cardinality(p_task_ids) then
      return query
        select f.task_id, f.token, null::text, null::jsonb, null::integer, null::integer, null::double precision,
          null::integer, null::timestamptz, true
        from unnest(p_task_ids, p_tokens) as f (task_id, token)
        where not windlass_internal.is_duplicate_completion(p_worker_id, f.task_id, f.token, array['complete']);
    end if;
  end if;
  if p_task_ids is not null and p_limit <= 0 then
    if v_count > 0 then
      perform windlass_internal.record_attempt_spans(p_task_ids, v_now);
      perform windlass_internal.record_successes(p_task_ids, v_now);
    end if;
    return;
  end if;

  select w.status, w.paused or w.status not in ('spawning', 'active') as is_barred, w.first_claimed_at is null as is_first,
    -- The ledger is no concern of a worker without a price, nor does it cost one anything. What a dispatcher finishes was
    -- done by nodes, which may have one.
    w.price_micros_per_hour is not null or (w.slot is not null and w.machine_id is null) or w.kind = 'dispatcher'
      as has_price,
    w.failing_since is not null or w.kind = 'dispatcher' as is_failing,
    exists (
      select from windlass.tasks t
      where t.queue = any (p_queues)
        and t.run_after <= v_now
    ) as is_due
  into v_worker
  from windlass.workers w
  where w.id = p_worker_id;
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
      raise exception 'worker % has ended (%): register a new one', p_worker_id, v_worker.status
        using errcode = 'no_data_found';
    end if;
    return;
  end if;

  -- Tasks whose time has come join the ready ones. Bounded: the rest is taken by the next claims.
  if v_worker.is_due then
    update windlass.tasks t
    set status = 'queued', run_after = null, ready_at = greatest(t.run_after, t.created_at)
    where t.id = any (array(
      select d.id
      from windlass.tasks d
      where d.queue = any (p_queues)
        and d.run_after <= v_now
      limit 1000
      for update skip locked
    ));
  end if;

  if cardinality(p_queues) > 1 then
    v_queues := array(
      select q.name
      from unnest(p_queues) as q (name)
      cross join lateral (
        select t.priority, t.id
        from windlass.tasks t
        where t.queue = q.name
          and t.status = 'queued'
          and t.run_after is null
        order by t.priority desc, t.id
        limit 1
      ) as head
      order by head.priority desc, head.id
    );
  end if;

  foreach v_queue in array v_queues loop
    return query
      update windlass.tasks t
      set status = 'running', worker_id = p_worker_id, attempts = t.attempts + 1, started_at = v_now, finished_at = null,
          claim_token = (v_chance || lpad(to_hex(t.id), 16, '0'))::uuid, progress = null, progress_note = null
      where t.id = any (array(
        select c.id
        from windlass.tasks c
        where c.queue = v_queue
          and c.status = 'queued'
          and c.run_after is null
        order by c.priority desc, c.id
        limit v_left
        for update skip locked
      ))
      returning t.id, t.claim_token, t.queue::text, t.payload, t.attempts, t.max_attempts::integer,
        t.timeout_s::double precision, t.priority, t.created_at, false;
    get diagnostics v_count = row_count;
    v_left := v_left - v_count;
    exit when v_left <= 0;
  end loop;

  if v_worker.is_first and v_left < p_limit then
    update windlass.workers set first_claimed_at = v_now where id = p_worker_id and first_claimed_at is null;
  end if;
end
$$;

-- Up to p_limit tasks for this worker, and nothing to finish.
create function windlass.claim_tasks(p_worker_id text, p_queues text[], p_limit integer default 1)
returns setof windlass.claim
language sql
as $$ select * from windlass.finish_and_claim(p_worker_id, null, null, null, p_queues, p_limit) $$;

-- One task, or no row.
create function windlass.claim_task(p_worker_id text, p_queues text[])
returns setof windlass.claim
language sql
as $$ select * from windlass.claim_tasks(p_worker_id, p_queues, 1) $$;

-- When the next waiting task of these queues is due; null if none waits.
create function windlass.next_run_after(p_queues text[]) returns timestamptz
language sql stable
as $$
  select min(due.run_after)
  from unnest(p_queues) as q (name)
  cross join lateral (
    select t.run_after
    from windlass.tasks t
    where t.queue = q.name
      and t.run_after is not null
    order by t.run_after
    limit 1
  ) as due
$$;

-- The longest silence of a worker with this lease that says nothing: three beats fit into a lease, and one may be late. An
-- outage that hides in it is so short that every other worker of that lease is heard again before its own runs out.
create function windlass_internal.max_heartbeat_gap_s(p_lease_s double precision) returns double precision
language sql immutable parallel safe
as $$ select 0.4 * p_lease_s $$;

-- A worker says that it lives and which claims it holds: [{"task_id", "token", "progress", "note"}]. It learns its
-- status, whether it is paused, and which of those claims it has lost. Vitals: pid, vram_total_mb, vram_used_mb and
-- whatever else is worth keeping in metadata. A worker that has ended, or is unknown, touches no row.
create function windlass.heartbeat(
  p_worker_id text,
  p_claims jsonb default '[]',
  p_vitals jsonb default '{}',
  out status text,
  out paused boolean,
  out lost uuid[]
)
language plpgsql
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
  v_now timestamptz := windlass.now();
  v_lease interval;
  v_kind text;
  v_ids bigint[];
  v_tokens uuid[];
  v_progress real[];
  v_notes text[];
begin
  -- Unpacked once: looking a claim up in the JSON again and again would take the square of their number.
  select array_agg((c ->> 'task_id')::bigint), array_agg((c ->> 'token')::uuid), array_agg((c ->> 'progress')::real),
    array_agg(left(c ->> 'note', 500))
  into v_ids, v_tokens, v_progress, v_notes
  from jsonb_array_elements(p_claims) as c;

  update windlass.workers w
  set last_heartbeat = v_now,
      heartbeat_gapless_since = case
        when w.last_heartbeat is null
          or v_now - w.last_heartbeat > make_interval(secs => windlass_internal.max_heartbeat_gap_s(w.lease_s))
        then v_now
        else w.heartbeat_gapless_since
      end,
      pid = coalesce((p_vitals ->> 'pid')::integer, w.pid),
      vram_total_mb = coalesce((p_vitals ->> 'vram_total_mb')::integer, w.vram_total_mb),
      vram_used_mb = coalesce((p_vitals ->> 'vram_used_mb')::integer, w.vram_used_mb),
      vram_at = case when p_vitals ? 'vram_total_mb' then v_now else w.vram_at end,
      vram_lost_at = case
        when (p_vitals ->> 'vram_total_mb')::integer > 0 then null
        when (p_vitals ->> 'vram_total_mb')::integer = 0 and w.vram_total_mb > 0 then v_now
        else w.vram_lost_at
      end,
      metadata = w.metadata || (p_vitals - 'pid' - 'vram_total_mb' - 'vram_used_mb')
  where w.id = p_worker_id
    and w.status in ('spawning', 'active', 'terminating')
  returning w.status, w.paused, make_interval(secs => w.lease_s), w.kind
  into status, paused, v_lease, v_kind;

  if not found then
    status := coalesce((select w.status from windlass.workers w where w.id = p_worker_id), 'unknown');
    paused := false;
    lost := coalesce(v_tokens, '{}');
    return;
  end if;

  lost := array(
    select h.token
    from unnest(v_ids, v_tokens) as h (task_id, token)
    where not exists (
      select from windlass.tasks t
      where t.id = h.task_id
        and t.claim_token = h.token
        and t.finished_at is null
    )
  );

  -- A locked row is being finished or taken back right now. Waiting for it would hold up this heartbeat, and could be a
  -- deadlock: whoever holds the task may want the worker's row, which is ours.
  update windlass.tasks t
  set progress = news.progress, progress_note = news.note
  from (
    select r.id, h.progress, h.note
    from unnest(v_ids, v_tokens, v_progress, v_notes) as h (task_id, token, progress, note)
    join windlass.tasks r on r.id = h.task_id and r.claim_token = h.token and r.finished_at is null
    where h.progress is not null
      and (r.progress, r.progress_note) is distinct from (h.progress, h.note)
    for no key update of r skip locked
  ) as news
  where t.id = news.id;

  -- What runs on a node is known to its dispatcher, who beats for it.
  if v_kind = 'node' then
    return;
  end if;

  -- Claims that this worker does not know of: the answer to its claim was lost on the way. After a lease nobody can
  -- still be waiting for that answer, and without this the task would run forever in name only.
  perform windlass.release_task(p_worker_id, t.id, t.claim_token, 'claimed by a worker that never received it')
  from (
    select r.id, r.claim_token
    from windlass.tasks r
    where r.id = any (array(
        select u.id
        from (
          select o.id, o.claim_token
          from windlass.tasks o
          where o.worker_id = p_worker_id
            and o.status = 'running'
            and o.started_at < v_now - v_lease
          except
          select h.task_id, h.token
          from unnest(v_ids, v_tokens) as h (task_id, token)
        ) as u
      ))
      -- Of the row as it is when it is locked: it may have been given back and claimed anew since we looked.
      and r.worker_id = p_worker_id
      and r.finished_at is null
      and r.started_at < v_now - v_lease
    for no key update of r skip locked
  ) as t;
end
$$;

-- A worker leaves of its own accord. One started by hand is over; one that was hired still has a machine, so it only
-- stops counting as a worker, and the control loop ends it. What it still holds goes back to the queue.
--
-- A task that somebody has locked is left to recover_lost_workers, or to whoever ends the machine: one who finishes it may
-- want the worker's row next, which is ours.
create function windlass.deregister_worker(p_worker_id text, p_reason text default 'left') returns void
language plpgsql
as $$
declare
  v_now timestamptz := windlass.now();
  v_worker windlass.workers;
begin
  update windlass.workers
  set status = case when slot is null then 'terminated' else 'terminating' end,
      terminated_at = case when slot is null then v_now end,
      terminating_at = coalesce(terminating_at, v_now),
      code = coalesce(code, 'DEREGISTERED'), reason = coalesce(reason, p_reason)
  where id = p_worker_id
    and status in ('spawning', 'active', 'terminating')
  returning * into v_worker;
  if found then
    perform windlass_internal.add_event('WORKER_DEREGISTERED', p_reason, v_worker.fleet, p_worker_id, null);
    perform windlass.release_task(p_worker_id, t.id, t.claim_token, 'its worker left')
    from (
      select r.id, r.claim_token
      from windlass.tasks r
      where r.worker_id = p_worker_id
        and r.status = 'running'
      order by r.id
      for no key update skip locked
    ) as t;
  end if;
end
$$;


-- ---------------------------------------------------------------------------------------------------- upkeep

-- Takes all tasks from these workers: back to the queue, or failed when the attempts are used up. The claims end
-- here, so whatever those workers still deliver changes nothing. A task that somebody else has locked is left to the next
-- call (of recover_lost_workers, or the control loop's): one long transaction must not hold up what all others wait for.
create function windlass_internal.requeue_tasks_of(
  p_worker_ids text[], p_code text, p_reason text, out requeued integer, out failed integer
)
language plpgsql
set enable_seqscan = off
as $$
declare
  v_now timestamptz := windlass.now();
begin
  with taken as (
    select t.id, t.worker_id as from_worker_id, t.queue, t.started_at
    from windlass.tasks t
    where t.worker_id = any (p_worker_ids)
      and t.status = 'running'
    order by t.id
    for update skip locked
  ),
  moved as (
    update windlass.tasks t
    set status = case when t.attempts < t.max_attempts then 'queued' else 'failed' end,
        finished_at = case when t.attempts < t.max_attempts then null else v_now end,
        worker_id = case when t.attempts < t.max_attempts then null else t.worker_id end,
        ready_at = case when t.attempts < t.max_attempts then v_now else t.ready_at end,
        started_at = case when t.attempts < t.max_attempts then null else t.started_at end,
        progress = case when t.attempts < t.max_attempts then null else t.progress end,
        progress_note = case when t.attempts < t.max_attempts then null else t.progress_note end,
        claim_token = null, error_code = p_code, error = p_reason
    from taken
    where t.id = taken.id
    returning t.id, t.queue, t.status, t.attempts, t.max_attempts, taken.from_worker_id
  ),
  noted as (
    insert into windlass.events (code, reason, worker_id, task_id, detail)
    select case m.status when 'queued' then 'TASK_REQUEUED' else 'TASK_FAILED' end,
      format('attempt %s of %s: %s', m.attempts, m.max_attempts, p_reason)
        || coalesce(windlass_internal.failed_attempts_text(m.failed_attempts), ''),
      m.from_worker_id, m.id,
      jsonb_strip_nulls(jsonb_build_object(
        'attempt', m.attempts, 'error_code', p_code, 'error', p_reason, 'failed_attempts', m.failed_attempts))
    from (
      select *, case status when 'failed' then windlass_internal.failed_attempts(id, from_worker_id, attempts, p_code) end as failed_attempts
      from moved
    ) as m
  ),
  spent as (
    insert into windlass.attempt_spans (worker_id, task_id, queue, from_at, until_at)
    select k.from_worker_id, k.id, k.queue, k.started_at, v_now
    from taken k
    join windlass.workers w on w.id = k.from_worker_id
    where (w.price_micros_per_hour is not null or (w.slot is not null and w.machine_id is null))
      and k.started_at < v_now
    on conflict do nothing
  )
  select count(*) filter (where m.status = 'queued'), count(*) filter (where m.status = 'failed')
  into requeued, failed
  from moved m;

  if requeued > 0 then
    perform pg_notify('windlass_tasks', '');
  end if;
end
$$;

-- Workers look after each other: those that were silent for longer than their lease lose their tasks to others. Those
-- started by hand are over with it. Hired ones are the orchestrator's to judge; only when none has led for twice the lost
-- one's lease are they marked as error here, and their machines wait for the control loop to come back.
--
-- The judge must itself have been heard without a gap for as long as it judges by: after an outage that silenced all,
-- nobody is condemned for it. What may hide in the judge's own gaps grows with its lease, so one with a longer lease than
-- the silent one's waits longer.
--
-- Tasks of workers that have ended are taken back too, whoever asks. A claim does not lock its worker's row, so one
-- that was under way while the worker left commits after what it held was released.
create function windlass.recover_lost_workers(p_judge_id text, p_limit integer default 100)
returns table (worker_id text, tasks_requeued integer, tasks_failed integer)
language plpgsql
set enable_seqscan = off
as $$
declare
  v_now timestamptz := windlass.now();
  v_judge_lease_s double precision;
  v_gapless_s double precision;
  v_leaderless_s double precision;
  v_lost record;
  v_holder_ids text[];
  v_is_over boolean;
  v_reason text;
begin
  select w.lease_s, extract(epoch from v_now - w.heartbeat_gapless_since)
  into v_judge_lease_s, v_gapless_s
  from windlass.workers w
  where w.id = p_judge_id
    and w.status in ('active', 'terminating')
    and w.last_heartbeat >= v_now - make_interval(secs => windlass_internal.max_heartbeat_gap_s(w.lease_s));

  -- Null where nobody has ever led.
  select extract(epoch from v_now - max(l.expires_at)) into v_leaderless_s
  from windlass.leases l
  where l.name not like 'ray:%'; -- dispatchers' leases: they judge nobody

  for v_lost in
    select w.id, w.fleet, w.slot, w.kind, extract(epoch from v_now - coalesce(w.last_heartbeat, w.created_at)) as silent_s
    from windlass.workers w
    cross join lateral (
      select w.lease_s + windlass_internal.max_heartbeat_gap_s(greatest(v_judge_lease_s - w.lease_s, 0)) as allowed_s
    ) as silence
    -- One that is spawning and was never heard may still be booting, which takes as long as it takes.
    where (w.status in ('active', 'terminating') or (w.status = 'spawning' and w.last_heartbeat is not null))
      and (w.slot is null or coalesce(v_leaderless_s > 2 * w.lease_s, true))
      and silence.allowed_s <= v_gapless_s
      and coalesce(w.last_heartbeat, w.created_at) < v_now - make_interval(secs => silence.allowed_s)
    order by w.id
    limit p_limit
    for update of w skip locked
  loop
    v_reason := format('no heartbeat for %s s', round(v_lost.silent_s));
    v_holder_ids := case
      when v_lost.kind = 'dispatcher' then windlass_internal.dispatcher_and_nodes(v_lost.id, v_lost.fleet) else array[v_lost.id]
    end;
    -- What a node has, nobody but its dispatcher accounts for. While somebody has such a task locked, the dispatcher is
    -- not over: by its row the next call finds the rest.
    v_is_over := v_lost.kind <> 'dispatcher' or not exists (
      select from windlass.tasks t
      where t.worker_id = any (v_holder_ids)
        and t.worker_id <> v_lost.id
        and t.status = 'running'
        and t.id <> all (array(
          select f.id
          from windlass.tasks f
          where f.worker_id = any (v_holder_ids)
            and f.status = 'running'
          order by f.id
          for update skip locked
        ))
    );
    if v_is_over then
      perform windlass_internal.add_event('WORKER_LOST', v_reason, v_lost.fleet, v_lost.id, null, jsonb_build_object('judge', p_judge_id));
    end if;
    worker_id := v_lost.id;
    select r.requeued, r.failed
    into tasks_requeued, tasks_failed
    from windlass_internal.requeue_tasks_of(v_holder_ids, 'WORKER_LOST', format('worker %s was lost', v_lost.id)) r;
    if not v_is_over then
      if tasks_requeued + tasks_failed > 0 then
        return next;
      end if;
      continue;
    end if;
    if v_lost.slot is null then
      -- Nobody hired it, so there is no machine to clean up: it is over.
      update windlass.workers
      set status = 'terminated', terminated_at = v_now, code = 'STALE_HEARTBEAT', reason = v_reason
      where id = v_lost.id;
    else
      perform windlass_internal.fail_worker(v_lost.id, 'STALE_HEARTBEAT', v_reason);
    end if;
    return next;
  end loop;

  for v_lost in
    select distinct t.worker_id as id
    from windlass.tasks t
    where t.status = 'running'
      and not exists (
        select from windlass.workers w where w.id = t.worker_id and w.status in ('spawning', 'active', 'terminating')
      )
    order by t.worker_id
    limit p_limit
  loop
    worker_id := v_lost.id;
    select r.requeued, r.failed
    into tasks_requeued, tasks_failed
    from windlass_internal.requeue_tasks_of(array[v_lost.id], 'WORKER_LOST', format('worker %s has ended', v_lost.id)) r;
    -- Nothing taken: what it held is locked, or was finished meanwhile.
    if tasks_requeued + tasks_failed > 0 then
      return next;
    end if;
  end loop;
end
$$;

-- Retention: deletes what is older than its limit, at most p_limit rows of each kind, oldest first. Returns how many
-- rows went: a caller goes on while that is p_limit or more. One at a time: who finds another at it has nothing to do.
create function windlass.sweep(
  p_complete_s double precision,
  p_failed_s double precision,
  p_events_s double precision,
  p_cycles_s double precision,
  p_logs_s double precision,
  p_charges_s double precision,
  p_limit integer default 1000
) returns integer
language plpgsql
set enable_seqscan = off
as $$
declare
  v_now timestamptz := windlass.now();
  v_deleted integer := 0;
  v_count integer;
begin
  if not pg_try_advisory_xact_lock(hashtext('windlass.sweep')) then
    return 0;
  end if;

  delete from windlass.tasks where id = any (array(
    select t.id
    from windlass.tasks t
    where t.status = 'complete'
      and t.finished_at < v_now - make_interval(secs => p_complete_s)
    order by t.finished_at
    limit p_limit
    for update skip locked
  ));
  get diagnostics v_count = row_count;
  v_deleted := v_deleted + v_count;

  delete from windlass.tasks where id = any (array(
    select t.id
    from windlass.tasks t
    where t.status = 'failed'
      and t.finished_at < v_now - make_interval(secs => p_failed_s)
    order by t.finished_at
    limit p_limit
    for update skip locked
  ));
  get diagnostics v_count = row_count;
  v_deleted := v_deleted + v_count;

  delete from windlass.events where id = any (array(
    select e.id from windlass.events e where e.at < v_now - make_interval(secs => p_events_s) order by e.at limit p_limit
  ));
  get diagnostics v_count = row_count;
  v_deleted := v_deleted + v_count;

  delete from windlass.cycles where id = any (array(
    select c.id from windlass.cycles c where c.started_at < v_now - make_interval(secs => p_cycles_s) order by c.started_at limit p_limit
  ));
  get diagnostics v_count = row_count;
  v_deleted := v_deleted + v_count;

  delete from windlass.logs where id = any (array(
    select l.id from windlass.logs l where l.at < v_now - make_interval(secs => p_logs_s) order by l.at limit p_limit
  ));
  get diagnostics v_count = row_count;
  v_deleted := v_deleted + v_count;

  delete from windlass.charges where id = any (array(
    select c.id from windlass.charges c where c.from_at < v_now - make_interval(secs => p_charges_s) order by c.from_at limit p_limit
  ));
  get diagnostics v_count = row_count;
  v_deleted := v_deleted + v_count;

  delete from windlass.spending where (fleet, hour, currency, queue) in (
    select s.fleet, s.hour, s.currency, s.queue
    from windlass.spending s
    where s.hour < v_now - make_interval(secs => p_charges_s)
    order by s.hour
    limit p_limit
  );
  get diagnostics v_count = row_count;
  v_deleted := v_deleted + v_count;

  -- Spans go when they are settled. What is left is of workers that turned out to have no price.
  delete from windlass.attempt_spans where (worker_id, from_at, task_id) in (
    select s.worker_id, s.from_at, s.task_id
    from windlass.attempt_spans s
    where s.until_at < v_now - make_interval(secs => greatest(p_complete_s, p_failed_s))
      and not exists (select from windlass.workers w where w.id = s.worker_id and w.settle_at is not null)
    order by s.until_at
    limit p_limit
  );
  get diagnostics v_count = row_count;
  v_deleted := v_deleted + v_count;

  -- Ended workers outlive the tasks that name them by nothing: events tell the rest of their story.
  delete from windlass.workers where id = any (array(
    select w.id
    from windlass.workers w
    where w.status = 'terminated'
      and w.terminated_at < v_now - make_interval(secs => greatest(p_complete_s, p_failed_s, p_events_s))
      -- Whose bill is not closed is remembered until it is.
      and w.settle_at is null
    order by w.terminated_at
    limit p_limit
  ));
  get diagnostics v_count = row_count;
  return v_deleted + v_count;
end
$$;
