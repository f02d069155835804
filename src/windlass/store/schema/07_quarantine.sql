-- Failed attempts and whose fault they are: what is recorded when an attempt fails, what a cycle observes of it, and
-- the refund of attempts that failed because of their worker. policy/quarantine.py decides.

-- Add a task to its worker's streak of failures. Nothing is written when a task completes, except by the first
-- completion after failures (record_successes): the normal path stays cheap.
create function windlass_internal.record_failure(p_worker_id text, p_task_id bigint) returns void
language sql
as $$
  update windlass.workers
  set failed_tasks = (failed_tasks || case when p_task_id = any (failed_tasks) then '{}' else array[p_task_id] end)
        [greatest(1, cardinality(failed_tasks) + (p_task_id <> all (failed_tasks))::integer - 99):],
      failing_since = coalesce(failing_since, windlass.now())
  where id = p_worker_id
$$;

-- End the streaks of the workers that completed one of these tasks at p_at.
create function windlass_internal.record_successes(p_task_ids bigint[], p_at timestamptz) returns void
language sql
as $$
  update windlass.workers w set failed_tasks = '{}', failing_since = null
  where w.failing_since is not null
    and w.id in (
      select t.worker_id from windlass.tasks t
      where t.id = any (p_task_ids) and t.status = 'complete' and t.finished_at = p_at
    )
$$;

-- All failed attempts of a task, including this last one, since it was enqueued or retried by hand; at most 20:
-- {"attempt", "worker_id", "error_code", "has_worked_since"}. Index events_task.
create function windlass_internal.failed_attempts(p_task_id bigint, p_worker_id text, p_attempt integer, p_code text)
returns jsonb
language sql stable
as $$
  with earlier as (
    select e.id, e.worker_id, (e.detail ->> 'attempt')::integer as attempt, e.detail ->> 'error_code' as code
    from windlass.events e
    where e.task_id = p_task_id
      and e.code in ('TASK_ERROR', 'TASK_REQUEUED', 'TASK_FAILED')
      and e.id > coalesce(
        (select max(r.id) from windlass.events r where r.task_id = p_task_id and r.code = 'TASK_RETRIED'), 0)
    order by e.id desc limit 19
  ),
  failed as (
    select * from earlier
    union all
    select 9223372036854775807, p_worker_id, p_attempt, p_code
  )
  select jsonb_agg(jsonb_build_object(
    'attempt', f.attempt,
    'worker_id', f.worker_id,
    'error_code', f.code,
    'has_worked_since', coalesce(p_task_id <> all (w.failed_tasks) and f.id < 9223372036854775807, false)
  ) order by f.id)
  from failed f
  left join windlass.workers w on w.id = f.worker_id
$$;

-- The same as text if more than one worker failed: "; it failed on a, b, c". At most five are named.
create function windlass_internal.failed_attempts_text(p_attempts jsonb) returns text
language sql immutable
as $$
  select case when count(*) > 1
    then '; failed on ' || string_agg(w.worker_id, ', ' order by w.first) filter (where w.place <= 5)
      || case when count(*) > 5 then format(' and %s more', count(*) - 5) else '' end
    else '' end
  from (
    select a ->> 'worker_id' as worker_id, min(n) as first, row_number() over (order by min(n)) as place
    from jsonb_array_elements(p_attempts) with ordinality as e (a, n)
    group by 1
  ) as w
$$;

-- Workers of a fleet on which at least p_min different tasks failed in a row, and how other workers did meanwhile, in
-- the form of model/snapshot.py. policy/quarantine.py decides. Without a suspect it costs one probe of workers_failing.
-- Bounds: 50 suspects; 500 completed tasks of these queues since the first suspect began to fail, and 1,000 failures of
-- the workers that completed them, newest first; each among at most the newest 20,000 rows of all queues.
create function windlass_internal.observe_failure_streaks(p_fleet text, p_queues text[], p_min integer) returns json
language sql stable
as $$
  with suspects as materialized (
    select w.id, w.failing_since, w.failed_tasks from windlass.workers w
    where w.fleet = p_fleet and w.failing_since is not null and w.status in ('spawning', 'active')
      and cardinality(w.failed_tasks) >= p_min
    order by w.failing_since, w.id collate "C" limit 50
  ),
  completed as materialized (
    select c.worker_id, c.finished_at
    from (
      select t.worker_id, t.queue, t.finished_at from windlass.tasks t
      where t.status = 'complete'
        and t.finished_at >= (select min(s.failing_since) from suspects s)
      order by t.finished_at desc limit 20000
    ) as c
    where c.queue = any (p_queues)
    order by c.finished_at desc limit 500
  ),
  failed as materialized (
    select f.worker_id, f.at
    from (
      select e.id, e.worker_id, e.at, e.code from windlass.events e
      where e.at >= (select min(s.failing_since) from suspects s)
      order by e.at desc, e.id desc limit 20000
    ) as f
    where f.code in ('TASK_ERROR', 'TASK_FAILED') and f.worker_id in (select c.worker_id from completed c)
    order by f.at desc, f.id desc limit 1000
  )
  select coalesce(json_agg(json_build_object(
    'worker_id', s.id,
    'since', s.failing_since,
    'failed', s.failed_tasks,
    'completed_by', (
      select coalesce(json_object_agg(t.id, t.worker_id order by t.id), '{}')
      from windlass.tasks t
      where t.id = any (s.failed_tasks)
        and t.status = 'complete' and t.worker_id <> s.id
    ),
    'failed_elsewhere', array(
      select distinct e.task_id from windlass.events e
      where e.task_id = any (s.failed_tasks) and e.code in ('TASK_ERROR', 'TASK_FAILED')
        and e.worker_id = any (others.ids)
      order by e.task_id
    ),
    'others', cardinality(others.ids),
    'others_completed', others.completed,
    'others_failed', (
      select count(*) from failed f where f.at >= s.failing_since and f.worker_id = any (others.ids)
    )
  ) order by s.failing_since, s.id collate "C"), '[]')
  from suspects s
  cross join lateral (
    select coalesce(array_agg(distinct c.worker_id), '{}') as ids, count(*) as completed
    from completed c
    where c.finished_at >= s.failing_since and c.worker_id <> s.id
  ) as others
$$;

-- Failures on a worker since p_since are its fault: they do not count as attempts. A task that is retrying because of
-- them, or that failed although it would have attempts left without them, is ready again; a running task continues. At
-- most 10,000 failures, newest first. Locked tasks keep their count. p_is_trial: no other worker has done better yet;
-- then a task is refunded only once since it was enqueued or retried by hand, because a task that fails everywhere
-- would be retried without end. Index events_task.
create function windlass_internal.refund_attempts(p_worker_id text, p_since timestamptz, p_is_trial boolean)
returns void
language plpgsql
set enable_seqscan = off
as $$
begin
  with failures as (
    select f.task_id, count(*)::integer as attempts
    from (
      select e.task_id from windlass.events e
      where e.worker_id = p_worker_id and e.at >= p_since and e.code in ('TASK_ERROR', 'TASK_FAILED')
      order by e.id desc limit 10000
    ) as f
    group by f.task_id
  ),
  held as (
    -- Everything the decision depends on, from the locked row: it may have changed since the statement began.
    select t.id, t.status, t.max_attempts, t.worker_id as last_worker_id, f.attempts as mine,
      greatest(t.attempts - f.attempts, case when t.status = 'running' then 1 else 0 end) as attempts_left
    from windlass.tasks t
    join failures f on f.task_id = t.id
    where t.status <> 'complete' and t.error_code is distinct from 'CANCELLED'
      and not (p_is_trial and exists (
        select
        from windlass.events a
        where a.task_id = t.id
          and a.code = 'ATTEMPTS_REFUNDED'
          and a.id > coalesce(
            (select max(r.id) from windlass.events r where r.task_id = t.id and r.code = 'TASK_RETRIED'), 0)
      ))
    order by t.id for no key update of t skip locked
  ),
  freed as (
    select h.id, h.mine, h.attempts_left,
      h.status = 'failed' and h.attempts_left < h.max_attempts
        or h.status = 'error' and h.last_worker_id = p_worker_id as is_ready
    from held h
  ),
  moved as (
    update windlass.tasks t
    set attempts = f.attempts_left,
        status = case when f.is_ready then 'queued' else t.status end,
        run_after = case when f.is_ready then null else t.run_after end,
        ready_at = case when f.is_ready then windlass.now() else t.ready_at end,
        progress = case when f.is_ready then null else t.progress end,
        progress_note = case when f.is_ready then null else t.progress_note end,
        finished_at = case when f.is_ready then null else t.finished_at end,
        started_at = case when f.is_ready then null else t.started_at end,
        claim_token = case when f.is_ready then null else t.claim_token end,
        worker_id = case when f.is_ready then null else t.worker_id end
    from freed f
    where t.id = f.id
    returning t.id, f.mine
  )
  insert into windlass.events (code, reason, worker_id, task_id)
  select 'ATTEMPTS_REFUNDED', format('%s failed attempts on worker %s refunded', m.mine, p_worker_id),
    p_worker_id, m.id
  from moved m
  order by m.id;
  if found then
    perform pg_notify('windlass_tasks', '');
  end if;
end
$$;
