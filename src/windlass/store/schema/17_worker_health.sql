-- The health of slots, in the terms of a process supervisor.

-- Slots that should have a worker and have none: as many as the fleet lacks of min_workers, and at least one while a
-- hold keeps it from spawning, or while tasks are queued that no live worker serves. Slots whose workers failed last
-- come first. A fleet that was shut down needs none. One without any plan yet needs its min_workers.
create view windlass_internal.empty_slots as
select f.name as fleet, e.slot
from windlass.fleets f
cross join lateral (
  select
    greatest(
      f.min_workers,
      (
        f.planner_state #>> '{hold,code}' is not null
        or exists (
          select from unnest(f.queues) as q (queue)
          where (
              exists (
                select from windlass.tasks t where t.queue = q.queue and t.status = 'queued' and t.run_after is null
              )
              or exists (
                select from windlass.tasks t
                where t.queue = q.queue and t.status = 'queued' and t.run_after <= windlass.now()
              )
            )
            and not exists (
              select from windlass.workers w where w.status <> 'terminated' and q.queue = any(w.queues)
            )
        )
      )::integer
    )
    - (
      select count(*) from windlass.workers w
      where w.fleet = f.name and w.slot is not null and w.status <> 'terminated'
    ) as count
) as missing
cross join lateral (
  select n.slot
  from generate_series(0, f.max_workers - 1) as n (slot)
  left join windlass.slots s on s.fleet = f.name and s.slot = n.slot
  where missing.count > 0
    and s.status is distinct from 'failed'
    and not exists (
      select from windlass.workers w where w.fleet = f.name and w.slot = n.slot and w.status <> 'terminated'
    )
  order by s.last_restart_at desc nulls last, n.slot limit greatest(missing.count, 0)
) as e
where f.planner_state #>> '{cadence,next_plan_in_s}' is not null
  or f.planner_state -> 'cadence' is null and f.min_workers > 0;

-- The component name of a slot in the view health. A fleet's row outlives the fleet, so the name includes the fleet
-- only if another fleet that serves the same first queue has a component.
create function windlass_internal.component_name(p_fleet text, p_queues text[], p_slot integer) returns text
language sql
stable
as $$
  select
    'worker:' || coalesce(p_queues[1], p_fleet)
    || case
      when exists (
        select from windlass.fleets o
        where o.name <> p_fleet and coalesce(o.queues[1], o.name) = coalesce(p_queues[1], p_fleet)
          and (
            exists (
              select from windlass.workers w
              where w.fleet = o.name and w.slot is not null and w.status <> 'terminated'
            )
            or exists (select from windlass.slots s where s.fleet = o.name and s.status = 'failed')
            or exists (select from windlass_internal.empty_slots e where e.fleet = o.name)
          )
      ) then '@' || p_fleet
      else ''
    end
    || ':' || p_slot
$$;

-- Per slot, in the terms of a process supervisor: starting, healthy, stopping, crashed, failed. Times are Unix seconds.
-- A worker with heartbeats that cannot do its work is starting or crashed, by the rules of policy/worker_state.py. A
-- paused worker is healthy.
-- A slot that should have a worker and has none is crashed if its last worker failed or a hold or a pause keeps it
-- empty, otherwise starting. Workers started by hand have no slot and are named by their id. A component is named
-- worker:QUEUE:SLOT, and worker:QUEUE@FLEET:SLOT while another fleet serves that queue first: names are unique.
create view windlass.health as
-- Read once per fleet: the planner state may be large.
with fleets as materialized (
  select f.name, f.paused, (f.planner_state #>> '{health,gpu_grace_s}')::double precision as gpu_grace_s
  from windlass.fleets f
)
select
  coalesce(
    windlass_internal.component_name(w.fleet, w.queues, w.slot),
    'worker:' || coalesce(w.queues[1], w.fleet) || ':' || w.id
  ) as component,
  extract(epoch from coalesce(w.last_heartbeat, w.created_at))::bigint as last_seen,
  case
    when s.status = 'failed' then 'failed'
    when w.status = 'error' then 'crashed'
    -- The control plane decides how long a machine may boot, and sets it to error.
    when w.status = 'spawning' and w.last_heartbeat is null then 'starting'
    when age.is_silent then 'crashed'
    when w.status = 'terminating' then 'stopping'
    when w.last_heartbeat is null then 'starting'
    when defect.reason is not null then case when defect.may_start then 'starting' else 'crashed' end
    else 'healthy'
  end as status,
  w.pid,
  (select min(t.id) from windlass.tasks t where t.worker_id = w.id and t.status = 'running') as current_job,
  jsonb_build_object(
    'queue_type', coalesce(w.queues[1], w.fleet),
    'batch_size', w.concurrency,
    'paused', w.paused,
    'error_message', case
      when s.status = 'failed' then s.failed_reason
      when w.status not in ('spawning', 'active') then w.reason
      when age.is_silent then format('no heartbeat for %s s', age.silent_s)
      else coalesce(
        case when w.last_heartbeat is not null then defect.reason end,
        case when f.paused then 'fleet is paused' when w.paused then 'worker is paused' end,
        w.reason
      )
    end
  ) as details_json,
  coalesce(s.restart_count, 0) as restart_count,
  extract(epoch from s.last_restart_at)::bigint as last_restart,
  extract(epoch from coalesce(s.created_at, w.created_at))::bigint as created_at
from windlass.workers w
join fleets f on f.name = w.fleet
cross join lateral (
  select
    case when w.kind = 'node' then coalesce(w.node ->> 'state', 'absent') end as state,
    case when w.kind = 'node' then
      round(extract(epoch from windlass.now() - (w.node ->> 'at')::timestamptz))
    end as silent_s
) as node
-- Why a worker with recent heartbeats cannot do its work, null if it can, and whether it may still become ready by
-- itself. Only workers with a slot are judged, as in policy/worker_state.py.
cross join lateral (
  select
    case
      when w.slot is null then null
      when node.state = 'absent' then 'its node has not joined the Ray cluster'
      when node.state = 'dead' then 'its Ray node is dead: ' || coalesce(w.node ->> 'note', 'no reason given')
      when node.silent_s > w.lease_s then
        format('the dispatcher of fleet %s has not reported on its Ray node for %s s', w.fleet, node.silent_s)
      when f.gpu_grace_s is null then null
      when w.kind = 'node' then
        case when coalesce((w.node #>> '{total,GPU}')::double precision, 0) = 0 then 'its Ray node has no GPU' end
      when w.vram_at is null then 'it has not reported a GPU'
      when w.vram_lost_at is not null then 'it lost its GPU: it reports no GPU memory'
      when coalesce(w.vram_total_mb, 0) = 0 then 'it reports no GPU memory'
    end as reason,
    case
      when node.state = 'absent' then true
      when node.state = 'dead' or node.silent_s > w.lease_s or f.gpu_grace_s is null then false
      else w.first_claimed_at is null and w.vram_lost_at is null
        and coalesce(w.prepared_at, w.created_at) >= windlass.now() - make_interval(secs => f.gpu_grace_s)
    end as may_start
) as defect
cross join lateral (
  select
    -- A machine that boots is not silent.
    (w.last_heartbeat is not null or w.status <> 'spawning')
      and coalesce(w.last_heartbeat, w.created_at) < windlass.now() - make_interval(secs => w.lease_s) as is_silent,
    round(extract(epoch from windlass.now() - coalesce(w.last_heartbeat, w.created_at))) as silent_s
) as age
left join windlass.slots s on s.fleet = w.fleet and s.slot = w.slot
where w.status <> 'terminated'
union all
select
  windlass_internal.component_name(s.fleet, f.queues, s.slot),
  extract(epoch from coalesce(s.failed_at, s.last_restart_at, s.created_at))::bigint,
  'failed',
  null, null,
  jsonb_build_object(
    'queue_type', coalesce(f.queues[1], s.fleet), 'batch_size', null, 'paused', f.paused,
    'error_message', s.failed_reason
  ),
  s.restart_count,
  extract(epoch from s.last_restart_at)::bigint,
  extract(epoch from s.created_at)::bigint
from windlass.slots s
join windlass.fleets f on f.name = s.fleet
where s.status = 'failed'
  and not exists (
    select from windlass.workers w where w.fleet = s.fleet and w.slot = s.slot and w.status <> 'terminated'
  )
union all
select
  windlass_internal.component_name(e.fleet, f.queues, e.slot),
  extract(epoch from coalesce(last.last_heartbeat, s.last_restart_at, s.created_at, f.created_at))::bigint,
  case when last.failed_at is not null or f.paused or cause.hold is not null then 'crashed' else 'starting' end,
  null, null,
  jsonb_build_object(
    'queue_type', coalesce(f.queues[1], e.fleet), 'batch_size', null, 'paused', f.paused,
    'error_message', case
      when cause.hold is not null then 'hold: ' || cause.hold
      when f.paused then 'fleet is paused'
      when last.failed_at is not null then last.reason
      when cause.is_unplanned then 'not started: the control plane has made no plan of this fleet yet'
    end
  ),
  coalesce(s.restart_count, 0),
  extract(epoch from s.last_restart_at)::bigint,
  extract(epoch from coalesce(s.created_at, f.created_at))::bigint
from windlass_internal.empty_slots e
join windlass.fleets f on f.name = e.fleet
cross join lateral (
  select f.planner_state #>> '{hold,reason}' as hold, f.planner_state -> 'cadence' is null as is_unplanned
) as cause
left join windlass.slots s on s.fleet = e.fleet and s.slot = e.slot
left join lateral (
  select w.last_heartbeat, w.failed_at, w.reason from windlass.workers w
  where w.fleet = e.fleet and w.slot = e.slot
  order by w.created_at desc, w.id collate "C" desc limit 1
) as last on true;
