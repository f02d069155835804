-- Named queries of store/control.py. Calls of functions stand in the Python that makes them.

-- name: fleets
-- `windlass status`; a handful of rows.
select
  f.name, f.provider, f.queues, f.min_workers, f.max_workers, f.paused, f.requested_workers, f.created_at,
  nullif(f.memory -> 'hold', 'null') as hold,
  (f.memory ->> 'planned_at')::timestamptz as planned_at,
  (f.memory ->> 'next_plan_in_s')::double precision as next_plan_in_s,
  exists (select from windlass.leases l where l.expires_at > windlass.now()) as is_led,
  array(
    select s.slot from windlass.slots s where s.fleet = f.name and s.status = 'failed' order by s.slot
  ) as failed_slots
from windlass.fleets f
order by f.name collate "C";

-- name: cycles
-- `windlass explain`; walks cycles_fleet backwards and stops at the limit.
select id, fleet, term, started_at, finished_at, decision, plan, summary, repeats, repeated_at
from windlass.cycles
where fleet = $1
order by id desc
limit $2;

-- name: cycle
-- `windlass replay`; primary key.
select id, fleet, term, started_at, finished_at, decision, plan, summary, repeats, repeated_at, snapshot
from windlass.cycles
where id = $1;

-- name: last_cycle_with
-- `windlass explain WORKER`; walks cycles_fleet backwards, over the last two hundred at the most.
select c.id, c.fleet, c.term, c.started_at, c.finished_at, c.decision, c.plan, c.summary, c.repeats, c.repeated_at, c.snapshot
from (
  select *
  from windlass.cycles
  where fleet = $1
  order by id desc
  limit 200
) as c
where c.snapshot -> 'workers' @> $2::jsonb
order by c.id desc
limit 1;

-- name: tasks_at_hand
-- `windlass status`; tasks_running.
select worker_id, array_agg(id order by id) as task_ids
from windlass.tasks
where status = 'running'
group by worker_id;

-- name: ready_before
-- `windlass explain TASK`; tasks_ready.
select count(*)
from windlass.tasks t
join windlass.tasks mine on mine.id = $1
where t.queue = mine.queue
  and t.status = 'queued'
  and t.run_after is null
  and (t.priority > mine.priority or (t.priority = mine.priority and t.id < mine.id));
