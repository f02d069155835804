-- Operations of a person on a fleet: `windlass restart`, `scale`, `pause`, `resume`, `terminate`.

create function windlass_internal.require_fleet(p_fleet text) returns void
language plpgsql
as $$
begin
  if not exists (select from windlass.fleets f where f.name = p_fleet) then
    raise exception 'fleet % not found', p_fleet using errcode = 'invalid_parameter_value';
  end if;
end
$$;

-- The orchestrator runs the fleet's next cycle at once. It listens for requests for cycles already (16_processes.sql);
-- those have an empty payload. A hint: without it, the cycle comes after the poll interval.
create function windlass_internal.wake_fleet(p_fleet text) returns void
language sql
as $$
  select pg_notify('windlass_cycle_requests', p_fleet)
$$;

-- Clear the restarts of a slot, so that it may be filled again, and the holds of the fleet. Null: all slots. Returns
-- how many slots were failed.
create function windlass_internal.restart_slots(p_fleet text, p_slot integer default null) returns integer
language plpgsql
as $$
declare
  v_count integer;
begin
  perform windlass_internal.require_fleet(p_fleet);
  select f.max_workers into v_count from windlass.fleets f where f.name = p_fleet;
  if p_slot not between 0 and v_count - 1
    and not exists (select from windlass.slots s where s.fleet = p_fleet and s.slot = p_slot)
  then
    raise exception 'slot % not found in fleet %: its slots are 0 to %', p_slot, p_fleet, v_count - 1
      using errcode = 'invalid_parameter_value';
  end if;
  with failed as (
    select s.slot from windlass.slots s
    where s.fleet = p_fleet and (p_slot is null or s.slot = p_slot) and s.status = 'failed'
    for update
  )
  select count(*) into v_count from failed;

  update windlass.slots
  set status = 'ok', restart_count = 0, last_restart_at = null, restarts = '{}', failed_at = null, failed_reason = null,
      needs_replacement = false
  where fleet = p_fleet
    and (p_slot is null or slot = p_slot);
  update windlass.fleets
  set reset_at = windlass.now(),
      restarted_at = case when p_slot is null then windlass.now() else restarted_at end
  where name = p_fleet;
  perform windlass_internal.add_event('SLOTS_RESTARTED', 'restart counts cleared on request', p_fleet, null, null,
    jsonb_build_object('slot', p_slot));
  perform windlass_internal.wake_fleet(p_fleet);
  return v_count;
end
$$;

-- Request workers beyond what the policy wants. A negative count withdraws requests. Returns how many are requested and
-- not yet spawned, at most as many as the fleet can take.
create function windlass_internal.request_workers(p_fleet text, p_count integer) returns integer
language plpgsql
as $$
declare
  v_requested integer;
begin
  perform windlass_internal.require_fleet(p_fleet);
  update windlass.fleets
  set requested_workers = greatest(
    0, least(requested_workers + p_count, windlass_internal.requestable_workers(p_fleet)))
  where name = p_fleet
  returning requested_workers into v_requested;
  perform windlass_internal.add_event('WORKERS_REQUESTED', 'on request', p_fleet, null, null,
    jsonb_build_object('count', p_count));
  perform windlass_internal.wake_fleet(p_fleet);
  return v_requested;
end
$$;

-- Replace the fleet's workers by workers of its current version. Returns the id of the request.
create function windlass_internal.request_deploy(
  p_fleet text, p_surge integer, p_max_unavailable integer, p_immediate boolean
) returns bigint
language plpgsql
as $$
declare
  v_id bigint;
begin
  perform windlass_internal.require_fleet(p_fleet);
  update windlass.fleets f
  set deploy = jsonb_build_object(
    'id', coalesce((f.deploy ->> 'id')::bigint, 0) + 1, 'surge', p_surge, 'max_unavailable', p_max_unavailable,
    'is_immediate', p_immediate, 'is_aborted', false)
  where f.name = p_fleet
  returning (f.deploy ->> 'id')::bigint into v_id;
  perform windlass_internal.add_event('DEPLOY_REQUESTED', 'on request', p_fleet, null, null,
    jsonb_build_object('id', v_id));
  perform windlass_internal.wake_fleet(p_fleet);
  return v_id;
end
$$;

-- Abort the fleet's rollout. False if there is nothing to abort, or if that was requested before. A rollout that began
-- without a request since the last abort (`windlass up --watch`) gets a request of its own, which is aborted.
create function windlass_internal.abort_deploy(p_fleet text) returns boolean
language plpgsql
as $$
begin
  perform windlass_internal.require_fleet(p_fleet);
  update windlass.fleets f
  set deploy = coalesce(f.deploy, '{"surge": 0, "max_unavailable": 0, "is_immediate": false}') || jsonb_build_object(
    'id', coalesce((f.deploy ->> 'id')::bigint, 0) + coalesce((f.deploy ->> 'is_aborted')::boolean, true)::integer,
    'is_aborted', true)
  where f.name = p_fleet and (
    not (f.deploy ->> 'is_aborted')::boolean
    or (
      f.planner_state #>> '{rollout,status}' = 'running'
      and coalesce((f.planner_state ->> 'aborted_deploy')::bigint, 0) >= coalesce((f.deploy ->> 'id')::bigint, 0)));
  if not found then
    return false;
  end if;
  perform windlass_internal.add_event('DEPLOY_ABORT_REQUESTED', 'on request', p_fleet, null, null);
  perform windlass_internal.wake_fleet(p_fleet);
  return true;
end
$$;

-- Pause or resume a fleet with its present and future workers. Returns how many workers changed.
create function windlass_internal.pause_fleet(p_fleet text, p_paused boolean) returns integer
language plpgsql
as $$
declare
  v_count integer;
begin
  perform windlass_internal.require_fleet(p_fleet);
  update windlass.fleets set paused = p_paused where name = p_fleet;
  perform windlass_internal.lock_workers(array(
    select w.id from windlass.workers w
    where w.fleet = p_fleet and w.status in ('spawning', 'active', 'terminating') and w.paused <> p_paused
  ));
  update windlass.workers set paused = p_paused
  where fleet = p_fleet and status in ('spawning', 'active', 'terminating') and paused <> p_paused;
  get diagnostics v_count = row_count;
  perform windlass_internal.add_event(case when p_paused then 'FLEET_PAUSED' else 'FLEET_RESUMED' end, 'on request',
    p_fleet, null, null);
  perform windlass_internal.wake_fleet(p_fleet);
  return v_count;
end
$$;

-- Pause or resume workers. Returns how many changed.
create function windlass_internal.pause_workers(p_worker_ids text[], p_paused boolean) returns integer
language sql
as $$
  select windlass_internal.lock_workers(p_worker_ids);
  with changed as (
    update windlass.workers set paused = p_paused
    where id = any (p_worker_ids) and status in ('spawning', 'active', 'terminating') and paused <> p_paused
    returning id, fleet
  ),
  recorded as (
    insert into windlass.events (code, reason, fleet, worker_id)
    select case when p_paused then 'WORKER_PAUSED' else 'WORKER_RESUMED' end, 'on request', c.fleet, c.id from changed c
  )
  -- wake_fleet returns void, which count() cannot count, so it is not called here.
  select count(pg_notify('windlass_cycle_requests', c.fleet))::integer from changed c
$$;

-- Drain workers. Returns how many changed.
create function windlass_internal.drain_workers(p_worker_ids text[], p_reason text) returns integer
language sql
as $$
  select windlass_internal.lock_workers(p_worker_ids);
  with changed as (
    update windlass.workers
    set status = 'terminating', terminating_at = windlass.now(), code = 'MANUAL', reason = p_reason
    where id = any (p_worker_ids) and status in ('spawning', 'active')
    returning id, fleet
  ),
  recorded as (
    insert into windlass.events (code, reason, fleet, worker_id)
    select 'WORKER_TERMINATING', p_reason, c.fleet, c.id from changed c
  )
  -- wake_fleet returns void, which count() cannot count, so it is not called here.
  select count(pg_notify('windlass_cycle_requests', c.fleet))::integer from changed c
$$;

create function windlass_internal.purge_reason(p_count bigint, p_queue text, p_statuses text[]) returns text
language sql stable
as $$
  select p_count || ' ' || array_to_string(p_statuses, ' and ') || ' tasks of '
    || coalesce('queue ' || p_queue, 'all queues') || ' deleted'
$$;

-- Delete finished tasks of these statuses, at most p_limit of each: `windlass tasks purge`, in bounded rounds, each
-- starting where the previous one ended. All rounds of a command have one event, with the sum of their counts: the first
-- round that deletes a task writes it and returns its id, and later rounds pass that. Indexes tasks_complete,
-- tasks_failed.
create function windlass_internal.purge_tasks(
  p_queue text, p_statuses text[], p_until timestamptz, p_complete_from timestamptz, p_failed_from timestamptz,
  p_limit integer, p_event_id bigint,
  out count bigint, out complete_to timestamptz, out failed_to timestamptz, out event_id bigint
)
language sql
as $$
  with deleted as (
    delete from windlass.tasks
    where id = any (
      array(
        select t.id from windlass.tasks t
        where t.status = 'complete' and 'complete' = any (p_statuses)
          and t.finished_at between coalesce(p_complete_from, '-infinity') and p_until
          and (p_queue is null or t.queue = p_queue)
          and not windlass_internal.is_deferred(t.adoption, t.unique_key)
        order by t.finished_at limit p_limit for update skip locked
      ) || array(
        select t.id from windlass.tasks t
        where t.status = 'failed' and 'failed' = any (p_statuses)
          and t.finished_at between coalesce(p_failed_from, '-infinity') and p_until
          and (p_queue is null or t.queue = p_queue)
          and not windlass_internal.is_deferred(t.adoption, t.unique_key)
        order by t.finished_at limit p_limit for update skip locked
      )
    )
    returning status, finished_at
  ),
  total as (
    select count(*) as count, max(d.finished_at) filter (where d.status = 'complete') as complete_to,
      max(d.finished_at) filter (where d.status = 'failed') as failed_to
    from deleted d
  ),
  recorded as (
    insert into windlass.events (code, reason, detail)
    select 'TASKS_PURGED', windlass_internal.purge_reason(t.count, p_queue, p_statuses),
      jsonb_build_object('count', t.count, 'queue', p_queue, 'statuses', p_statuses)
    from total t
    where p_event_id is null and t.count > 0
    returning id
  ),
  continued as (
    update windlass.events e
    set reason = windlass_internal.purge_reason((e.detail ->> 'count')::bigint + t.count, p_queue, p_statuses),
      detail = jsonb_set(e.detail, '{count}', to_jsonb((e.detail ->> 'count')::bigint + t.count))
    from total t
    where e.id = p_event_id and e.code = 'TASKS_PURGED' and t.count > 0
      and e.actor is not distinct from nullif(current_setting('windlass.actor', true), '')
  )
  select t.count, t.complete_to, t.failed_to, coalesce(r.id, p_event_id)
  from total t
  left join recorded r on true
$$;

-- End a worker at once, with its running tasks. Counts as a failure of neither its slot nor its fleet. A spawned worker
-- keeps its slot until its machine is deleted; one started by hand is terminated. False if it had ended already.
create function windlass_internal.terminate_worker(p_worker_id text, p_reason text) returns boolean
language plpgsql
as $$
declare
  v_fleet text;
begin
  select w.fleet into v_fleet from windlass.workers w
  where w.id = p_worker_id and w.status in ('spawning', 'active', 'terminating')
  for update;
  if v_fleet is not null then
    perform windlass_internal.fail_worker(p_worker_id, 'MANUAL', p_reason, false);
    update windlass.workers set status = 'terminated', terminated_at = windlass.now()
    where id = p_worker_id and slot is null;
    perform windlass_internal.wake_fleet(v_fleet);
  end if;
  return v_fleet is not null;
end
$$;
