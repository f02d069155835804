-- Lost and failed workers: take their tasks back.

-- Take all tasks from these workers: requeue them, or fail them if their attempts are used up. Their claims end here,
-- so later results of these workers change nothing. Locked tasks are left to the next call (of recover_lost_workers or
-- the control plane): one long transaction must not block the caller.
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
    select t.id, t.worker_id as from_worker_id, t.queue, t.started_at from windlass.tasks t
    where t.worker_id = any (p_worker_ids) and t.status = 'running'
    order by t.id for update skip locked
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
    returning t.id, t.queue, t.status, t.attempts, t.max_attempts, taken.from_worker_id,
      taken.started_at as attempt_started_at
  ),
  recorded as (
    insert into windlass.events (code, reason, worker_id, task_id, detail)
    select case m.status when 'queued' then 'TASK_REQUEUED' else 'TASK_FAILED' end,
      format('attempt %s of %s: %s', m.attempts, m.max_attempts, windlass_internal.error_headline(p_reason))
        || coalesce(windlass_internal.failed_attempts_text(m.failed_attempts), ''),
      m.from_worker_id, m.id,
      jsonb_strip_nulls(jsonb_build_object(
        'attempt', m.attempts, 'started_at', m.attempt_started_at, 'error_code', p_code, 'error', p_reason,
        'failed_attempts', m.failed_attempts))
    from (
      select *,
        case status when 'failed' then windlass_internal.failed_attempts(id, from_worker_id, attempts, p_code) end
          as failed_attempts
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

-- Whether the lease is held. False for a lease that was written before the clock was set back.
create function windlass_internal.is_held(p_lease windlass.leases) returns boolean
language sql stable
as $$
  select p_lease.expires_at > windlass.now()
    and p_lease.expires_at <= windlass.now() + make_interval(secs => p_lease.ttl_s)
$$;

-- A dispatcher and the nodes of its fleet, unless another dispatcher holds the fleet's lease: all workers whose tasks
-- are lost with it.
create function windlass_internal.dispatcher_and_nodes(p_dispatcher_id text, p_fleet text) returns text[]
language sql stable
as $$
  select array[p_dispatcher_id] || array(
    select w.id from windlass.workers w
    where w.fleet = p_fleet and w.kind = 'node' and w.status <> 'terminated'
      and not exists (
        select from windlass.leases l where l.name = 'ray:' || p_fleet and windlass_internal.is_held(l)
      )
  )
$$;

-- Set a worker to error and requeue its tasks. Returns the number of tasks taken from it.
--   p_counts     it failed by itself, so its slot counts a restart
--   p_evidence   shown in the event
--   p_refund     {"since", "is_trial", "max_releases"}: failures since then are the worker's fault (see
--                refund_attempts), and its running tasks are released without counting the attempt, unless that happened
--                to a task max_releases times since it was enqueued or retried by hand (index events_task)
--   p_is_proven  it had proven to work, so its fleet's failure rate does not count it
create function windlass_internal.fail_worker(
  p_worker_id text, p_code text, p_reason text, p_counts boolean default true, p_cycle_id bigint default null,
  p_evidence jsonb default null, p_refund jsonb default null, p_is_proven boolean default false
) returns integer
language plpgsql
as $$
declare
  v_now timestamptz := windlass.now();
  v_worker windlass.workers;
  v_released integer := 0;
  v_requeued integer := 0;
  c_release constant text := 'not the fault of the task: ';
begin
  update windlass.workers
  set status = 'error', code = p_code, reason = p_reason, failed_at = case when p_counts then v_now end,
      is_proven = p_is_proven
  where id = p_worker_id and status in ('spawning', 'active', 'terminating')
  returning * into v_worker;
  if not found then
    return 0;
  end if;
  insert into windlass.events (code, reason, fleet, worker_id, cycle_id, detail)
  values ('WORKER_ERROR', p_reason, v_worker.fleet, p_worker_id, p_cycle_id,
    jsonb_strip_nulls(jsonb_build_object('code', p_code, 'evidence', p_evidence)));
  if p_counts and v_worker.slot is not null then
    update windlass.slots
    set restart_count = restart_count + 1, last_restart_at = v_now, needs_replacement = true,
        -- The newest 100: no restart limit is higher.
        restarts = (restarts || v_now)[greatest(1, cardinality(restarts) - 98):]
    where fleet = v_worker.fleet and slot = v_worker.slot;
  end if;
  if p_refund is not null then
    perform windlass_internal.refund_attempts(
      p_worker_id, (p_refund ->> 'since')::timestamptz, (p_refund ->> 'is_trial')::boolean);
    with held as materialized (
      select t.id, t.claim_token from windlass.tasks t
      where t.worker_id = p_worker_id and t.status = 'running'
        and not coalesce((
          select count(*) from windlass.events e
          where e.task_id = t.id and e.code = 'TASK_RELEASED' and starts_with(e.reason, c_release)
            and e.id > coalesce(
              (select max(r.id) from windlass.events r where r.task_id = t.id and r.code = 'TASK_RETRIED'), 0)
        ) >= (p_refund ->> 'max_releases')::integer, false)
      order by t.id for no key update skip locked
    )
    select count(*) into v_released
    from held
    where windlass_internal.release_claim(p_worker_id, held.id, held.claim_token, c_release || p_reason);
  end if;
  select r.requeued + r.failed + v_released into v_requeued
  from windlass_internal.requeue_tasks_of(
    array[p_worker_id], p_code, format('worker %s: %s', p_worker_id, p_reason)) as r;
  return v_requeued;
end
$$;

-- Live workers recover the tasks of workers whose lease has expired. Lost workers without a slot are terminated.
-- Spawned workers are left to the orchestrator, unless there was no leader for twice the lost worker's lease: then they
-- are set to error, and their machines wait for the control plane.
--
-- The caller must itself have had heartbeats without a gap for as long as that lease: after an outage that
-- affected all workers, none is lost. A gap that is normal for the caller grows with its lease, so a caller with a
-- longer lease waits longer.
--
-- Tasks of terminated workers are recovered too, for every caller. A claim does not lock its worker's row, so a
-- claim that ran while its worker deregistered commits after the worker's tasks were released.
--
-- All workers call this, and each call reads all live workers. So a call that finds nothing notes until when that stays
-- so: until the first lease expires, at most for a second, the shortest lease of a worker that registers meanwhile.
-- Calls until then return at once.
create function windlass.recover_lost_workers(p_judge_id text, p_limit integer default 100, p_secret text default null)
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
  v_can_end boolean;
  v_is_found boolean := false;
  v_led_until timestamptz;
  v_reason text;
begin
  perform windlass_internal.check_worker(p_judge_id, p_secret);
  perform windlass_internal.follow_clock();
  if exists (
    select from windlass.clock c where v_now between c.judged_until - interval '1 second' and c.judged_until
  ) then
    return;
  end if;

  select w.lease_s, extract(epoch from v_now - w.heartbeat_gapless_since)
  into v_judge_lease_s, v_gapless_s
  from windlass.workers w
  where w.id = p_judge_id
    and w.status in ('active', 'terminating')
    and w.last_heartbeat >= v_now - make_interval(secs => windlass_internal.max_heartbeat_gap_s(w.lease_s));

  -- Null if there never was a leader.
  select max(l.expires_at), extract(epoch from v_now - max(l.expires_at)) into v_led_until, v_leaderless_s
  from windlass.leases l
  where l.name not like 'ray:%'; -- dispatchers hold those

  for v_lost in
    select w.id, w.fleet, w.slot, w.kind,
      extract(epoch from v_now - coalesce(w.last_heartbeat, w.created_at)) as silent_s,
      -- As policy/worker_state.py: it got through its first tasks, or worked on them for a minute.
      w.first_claimed_at is not null and (
        coalesce(w.last_heartbeat >= w.first_claimed_at + interval '1 minute', false)
        or not exists (
          select from windlass.tasks t
          where t.worker_id = w.id and t.status = 'running' and t.started_at <= w.first_claimed_at
        )
      ) as is_proven
    from windlass.workers w
    cross join lateral (
      select w.lease_s + windlass_internal.max_heartbeat_gap_s(greatest(v_judge_lease_s - w.lease_s, 0)) as allowed_s
    ) as silence
    -- A spawning worker without a heartbeat may still be booting, however long that takes.
    where (w.status in ('active', 'terminating') or (w.status = 'spawning' and w.last_heartbeat is not null))
      and (w.slot is null or coalesce(v_leaderless_s > 2 * w.lease_s, true))
      and silence.allowed_s <= v_gapless_s
      and coalesce(w.last_heartbeat, w.created_at) < v_now - make_interval(secs => silence.allowed_s)
    order by w.id limit least(p_limit, 1000) for update of w skip locked
  loop
    v_is_found := true;
    v_reason := format('no heartbeat for %s s', round(v_lost.silent_s));
    v_holder_ids := case
      when v_lost.kind = 'dispatcher' then windlass_internal.dispatcher_and_nodes(v_lost.id, v_lost.fleet)
      else array[v_lost.id]
    end;
    -- Only the dispatcher's row leads to the tasks on its nodes. While one of them is locked, the dispatcher is not
    -- ended, so that the next call finds the rest.
    v_can_end := v_lost.kind <> 'dispatcher' or not exists (
      select from windlass.tasks t
      where t.worker_id = any (v_holder_ids) and t.worker_id <> v_lost.id and t.status = 'running'
        and t.id <> all (array(
          select f.id from windlass.tasks f
          where f.worker_id = any (v_holder_ids) and f.status = 'running'
          order by f.id for update skip locked
        ))
    );
    if v_can_end then
      perform windlass_internal.add_event('WORKER_LOST', v_reason, v_lost.fleet, v_lost.id, null,
        jsonb_build_object('judge', p_judge_id));
    end if;
    worker_id := v_lost.id;
    select r.requeued, r.failed
    into tasks_requeued, tasks_failed
    from windlass_internal.requeue_tasks_of(v_holder_ids, 'WORKER_LOST', format('worker %s was lost', v_lost.id)) r;
    if not v_can_end then
      if tasks_requeued + tasks_failed > 0 then
        return next;
      end if;
      continue;
    end if;
    if v_lost.slot is null then
      -- Started by hand: there is no machine to delete.
      update windlass.workers
      set status = 'terminated', terminated_at = v_now, code = 'STALE_HEARTBEAT', reason = v_reason
      where id = v_lost.id;
    else
      perform windlass_internal.fail_worker(
        v_lost.id, 'STALE_HEARTBEAT', v_reason, p_is_proven => v_lost.is_proven);
    end if;
    return next;
  end loop;

  for v_lost in
    select distinct t.worker_id as id from windlass.tasks t
    where t.status = 'running'
      and not exists (
        select from windlass.workers w where w.id = t.worker_id and w.status in ('spawning', 'active', 'terminating')
      )
    order by t.worker_id limit least(p_limit, 1000)
  loop
    v_is_found := true;
    worker_id := v_lost.id;
    select r.requeued, r.failed
    into tasks_requeued, tasks_failed
    from windlass_internal.requeue_tasks_of(
      array[v_lost.id], 'WORKER_LOST', format('worker %s has terminated', v_lost.id)) r;
    -- Nothing taken: its tasks are locked, or were finished meanwhile.
    if tasks_requeued + tasks_failed > 0 then
      return next;
    end if;
  end loop;

  if not v_is_found and p_limit >= 1 then
    -- A locked row is being written by another call, or by follow_clock.
    update windlass.clock set judged_until = least(v_now + interval '1 second', (
      select min(case
        when w.slot is null then e.expires_at
        else greatest(e.expires_at, v_led_until + make_interval(secs => 2 * w.lease_s))
      end)
      from windlass.workers w
      cross join lateral (
        select coalesce(w.last_heartbeat, w.created_at) + make_interval(secs => w.lease_s) as expires_at
      ) as e
      where w.status in ('active', 'terminating') or (w.status = 'spawning' and w.last_heartbeat is not null)
    ))
    where is_only = (select c.is_only from windlass.clock c for no key update skip locked);
  end if;
end
$$;
