-- Producers: enqueue, retry, cancel. And the helpers that record events and attempts.

-- A claimed task. Only finish_and_claim sets is_lost: the row then names a finished task whose claim was not valid.
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
  is_lost boolean
);

-- The one line of an error that events and lists show: the exception's own first line, or for a process that died how
-- it died. model/error_text.py has the same rules.
create function windlass_internal.error_headline(p_error text) returns text
language plpgsql immutable parallel safe
as $$
declare
  v_first text;
  v_raised text;
  v_line text;
  v_text text;
  v_is_expected boolean := true;
  v_is_in_frames boolean := false;
begin
  foreach v_line in array string_to_array(coalesce(p_error, ''), e'\n') loop
    v_line := rtrim(v_line, e' \t\r');
    if v_first is null and ltrim(v_line, e' \t\r') <> '' then
      v_first := ltrim(v_line, e' \t\r');
      -- What follows is the output of a process.
      exit when v_first like '%; last output:';
    end if;
    if v_is_in_frames then
      v_text := regexp_replace(v_line, '^ *\| ?', '');
      if v_text <> '' and v_text not like ' %' then
        v_raised := v_text;
        v_is_in_frames := false;
        v_is_expected := false;
      end if;
    elsif v_is_expected and v_line like '%Traceback (most recent call last):' then
      v_is_in_frames := true;
    elsif trim(v_line, ' |') in (
      'The above exception was the direct cause of the following exception:',
      'During handling of the above exception, another exception occurred:'
    ) then
      v_is_expected := true;
    end if;
  end loop;
  v_text := coalesce(v_raised, regexp_replace(v_first, '; last output:$', ''), '');
  return case when length(v_text) <= 200 then v_text else left(v_text, 199) || '…' end;
end
$$;

-- An error as it is stored. 8,000 characters hold a long traceback. A longer one keeps both ends: the kind of the error
-- is at the beginning of a message, the cause at the end of a traceback.
create function windlass_internal.truncate_error(p_error text) returns text
language sql immutable parallel safe
as $$
  select case
    when length(p_error) <= 8000 then p_error
    else left(p_error, 2000) || ' ... ' || right(p_error, 5995)
  end
$$;

-- Without control characters but tab and line feed: a terminal that shows the text must not obey it.
create function windlass_internal.printable(p_text text) returns text
language sql immutable parallel safe
as $$ select regexp_replace(p_text, '[\u0001-\u0008\u000b-\u001f\u007f-\u009f]', '?', 'g') $$;

-- Workers and producers choose some reasons: the list of events stays readable whatever they send.
create function windlass_internal.add_event(
  p_code text, p_reason text, p_fleet text, p_worker_id text, p_task_id bigint, p_detail jsonb default null
) returns void
language sql
as $$
  insert into windlass.events (code, reason, fleet, worker_id, task_id, detail)
  values (p_code, windlass_internal.printable(left(p_reason, 8000)), p_fleet, p_worker_id, p_task_id, p_detail)
$$;

-- Seconds to wait before attempt p_attempts + 1: doubles from 5 s to at most 15 min, less a random share of up to half,
-- so that tasks that failed together are not retried together. policy/backoff.py has the same formula.
create function windlass_internal.retry_delay_s(p_attempts integer, p_jitter double precision) returns double precision
language sql immutable parallel safe
as $$
  select least(5.0 * power(2.0, least(greatest(p_attempts, 1), 30) - 1), 900.0) * (1.0 - 0.5 * p_jitter)
$$;

-- Record the span of an ended attempt for the ledger, if its worker has a price or its price is not known yet.
create function windlass_internal.record_attempt_span(
  p_worker_id text, p_task_id bigint, p_queue text, p_from_at timestamptz, p_until_at timestamptz
) returns void
language sql
as $$
  insert into windlass.attempt_spans (worker_id, task_id, queue, from_at, until_at)
  select p_worker_id, p_task_id, p_queue, p_from_at, p_until_at from windlass.workers w
  where w.id = p_worker_id
    and (w.price_micros_per_hour is not null or (w.slot is not null and w.machine_id is null))
    and p_from_at < p_until_at
  on conflict do nothing
$$;

-- The same for the tasks that were completed at p_until_at.
create function windlass_internal.record_attempt_spans(p_task_ids bigint[], p_until_at timestamptz) returns void
language sql
as $$
  insert into windlass.attempt_spans (worker_id, task_id, queue, from_at, until_at)
  select t.worker_id, t.id, t.queue, t.started_at, p_until_at from windlass.tasks t
  join windlass.workers w on w.id = t.worker_id
  where (w.price_micros_per_hour is not null or (w.slot is not null and w.machine_id is null))
    and t.id = any (p_task_ids) and t.status = 'complete' and t.finished_at = p_until_at
    and t.started_at < p_until_at
  on conflict do nothing
$$;

-- Wakes idle workers after enqueue(), a plain INSERT or COPY. One notification per queue and transaction. It is only a
-- hint: workers poll as well.
create function windlass_internal.notify_tasks() returns trigger
language plpgsql
as $$
begin
  perform pg_notify('windlass_tasks', q.queue) from (select distinct queue from inserted) q;
  return null;
end
$$;

create trigger notify_tasks
  after insert on windlass.tasks
  referencing new table as inserted
  for each statement execute function windlass_internal.notify_tasks();


-- ---------------------------------------------------------------------------------------- public: producers

-- Add one task in the caller's transaction and return its id. If a task with this unique key exists, return the id of
-- that task, unchanged.
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
  perform windlass_internal.check_settings();
  if octet_length(p_payload::text) > least(p_max_payload_bytes, 67108864) then
    raise exception 'the payload has % bytes and at most % are accepted: '
      'store large data elsewhere and put its address into the task',
      octet_length(p_payload::text), least(p_max_payload_bytes, 67108864)
      using errcode = 'program_limit_exceeded';
  end if;

  -- The task with this key may be deleted between the insert and the select. Ten times in a row is not a coincidence.
  for v_round in 1..10 loop
    insert into windlass.tasks (queue, payload, priority, run_after, max_attempts, timeout_s, unique_key)
    values (p_queue, p_payload, p_priority, p_run_after, p_max_attempts, p_timeout_s, p_unique_key)
    on conflict (queue, unique_key) where unique_key is not null and adoption is null do nothing
    returning id into v_id;
    if v_id is not null then
      return v_id;
    end if;

    select t.id into v_id from windlass.tasks t
    where t.queue = p_queue and t.unique_key = p_unique_key and t.adoption is null;
    if v_id is not null then
      return v_id;
    end if;
  end loop;
  raise exception 'task with unique_key % was deleted concurrently: retry', p_unique_key
    using errcode = 'serialization_failure';
end
$$;

-- Add tasks in the caller's transaction, in order. The arrays belong together; a missing array means the defaults of
-- enqueue. Tasks with a unique key that exists are skipped. Returns the number of added tasks. At most 10,000 per call.
create function windlass.enqueue_many(
  p_queues text[],
  p_payloads jsonb[],
  p_priorities integer[] default null,
  p_run_after timestamptz[] default null,
  p_max_attempts integer[] default null,
  p_timeouts_s double precision[] default null,
  p_unique_keys text[] default null,
  p_max_payload_bytes integer default 1048576
) returns integer
language plpgsql
as $$
declare
  v_limit integer := least(p_max_payload_bytes, 67108864);
  v_count integer := cardinality(p_queues);
begin
  perform windlass_internal.check_settings();
  if v_count > 10000 then
    raise exception 'at most 10000 tasks are accepted in one call, not %', v_count
      using errcode = 'program_limit_exceeded';
  end if;
  if cardinality(p_payloads) is distinct from v_count
    or v_count <> all (array[
      coalesce(cardinality(p_priorities), v_count), coalesce(cardinality(p_run_after), v_count),
      coalesce(cardinality(p_max_attempts), v_count), coalesce(cardinality(p_timeouts_s), v_count),
      coalesce(cardinality(p_unique_keys), v_count)
    ])
  then
    raise exception 'each task needs an element in each array: the arrays differ in length'
      using errcode = 'invalid_parameter_value';
  end if;
  if exists (select from unnest(p_payloads) as p where octet_length(p::text) > v_limit) then
    raise exception 'a payload has more than % bytes: store large data elsewhere and put its address into the task',
      v_limit using errcode = 'program_limit_exceeded';
  end if;
  insert into windlass.tasks (queue, payload, priority, run_after, max_attempts, timeout_s, unique_key)
  select t.queue, coalesce(t.payload, 'null'), coalesce(t.priority, 0), t.run_after, coalesce(t.max_attempts, 3),
    t.timeout_s, t.unique_key
  from unnest(p_queues, p_payloads, p_priorities, p_run_after, p_max_attempts, p_timeouts_s, p_unique_keys)
    with ordinality as t (queue, payload, priority, run_after, max_attempts, timeout_s, unique_key, position)
  order by t.position
  on conflict (queue, unique_key) where unique_key is not null and adoption is null do nothing;
  get diagnostics v_count = row_count;
  return v_count;
end
$$;

-- Whether the caller's transaction added this task: enqueue also returns the id of a task that existed.
create function windlass.is_new_task(p_task_id bigint) returns boolean
language sql stable
as $$
  select t.xmin::text::bigint = txid_current() % (2 ^ 32)::bigint from windlass.tasks t
  where t.id = p_task_id
$$;

-- Requeue a failed or retrying task at its old position with all its attempts. True if it did.
create function windlass.retry_task(p_task_id bigint) returns boolean
language plpgsql
as $$
declare
  v_queue text;
begin
  perform windlass_internal.check_settings();
  update windlass.tasks
  set status = 'queued', run_after = null, ready_at = windlass.now(), attempts = 0, claim_token = null,
      worker_id = null, started_at = null, finished_at = null, progress = null, progress_note = null
  where id = p_task_id and status in ('error', 'failed')
  returning queue into v_queue;
  if not found then
    return false;
  end if;
  perform windlass_internal.add_event('TASK_RETRIED', 'retried on request', null, null, p_task_id);
  perform pg_notify('windlass_tasks', v_queue);
  return true;
end
$$;

-- Requeue failed tasks of a queue, at most p_limit, oldest first. Returns them with the time at which each failed.
-- Repeat until none is returned, with the latest of these times as p_failed_from, so that failed tasks of other queues
-- are scanned once and not in every round. Tasks that failed after p_failed_before stay: with the time at which the
-- caller began, a task that fails again at once is not retried without end. Cancelled tasks are skipped unless
-- p_include_cancelled. Index tasks_failed.
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
  perform windlass_internal.check_settings();
  return query
    with dead as (
      select f.id, f.finished_at from windlass.tasks f
      where f.status = 'failed'
        and f.finished_at between coalesce(p_failed_from, '-infinity') and p_failed_before
        and f.queue = p_queue
        and (p_include_cancelled or f.error_code is distinct from 'CANCELLED')
      order by f.finished_at limit least(p_limit, 10000) for update skip locked
    ),
    retried as (
      update windlass.tasks t
      set status = 'queued', run_after = null, ready_at = windlass.now(), attempts = 0, claim_token = null,
          worker_id = null, started_at = null, finished_at = null, progress = null, progress_note = null
      where t.id = any (array(select d.id from dead d))
      returning t.id
    ),
    recorded as (
      insert into windlass.events (code, reason, task_id)
      select 'TASK_RETRIED', 'retried on request', r.id from retried r
    )
    select r.id, d.finished_at from retried r join dead d on d.id = r.id order by r.id;
  if found then
    perform pg_notify('windlass_tasks', p_queue);
  end if;
end
$$;

-- Fail locked tasks that are not finished, with code CANCELLED.
create function windlass_internal.cancel_locked_tasks(p_task_ids bigint[], p_reason text) returns void
language sql
as $$
  select windlass_internal.record_attempt_span(t.worker_id, t.id, t.queue, t.started_at, windlass.now())
  from windlass.tasks t where t.id = any (p_task_ids) and t.status = 'running';

  update windlass.tasks
  set status = 'failed', run_after = null, error_code = 'CANCELLED', error = windlass_internal.truncate_error(p_reason),
      claim_token = null, finished_at = windlass.now()
  where id = any (p_task_ids);

  select windlass_internal.add_event('TASK_CANCELLED', p_reason, null, t.worker_id, t.id)
  from windlass.tasks t where t.id = any (p_task_ids);
$$;

-- Fail a task that is not finished, with code CANCELLED. A running task loses its claim: its worker learns it from the
-- next heartbeat and stops. True if it did.
create function windlass.cancel_task(p_task_id bigint, p_reason text default 'cancelled by hand') returns boolean
language plpgsql
as $$
begin
  perform windlass_internal.check_settings();
  perform from windlass.tasks t
  where t.id = p_task_id and t.status in ('queued', 'running', 'error')
  for no key update;
  if not found then
    return false;
  end if;
  perform windlass_internal.cancel_locked_tasks(array[p_task_id], p_reason);
  return true;
end
$$;
