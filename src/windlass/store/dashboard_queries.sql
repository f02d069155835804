-- Named queries of the dashboard and the HTTP API. Each reads a bounded number of rows.

-- name: worker_counts
-- overview; workers_live, and all of tasks_running once. Dispatchers run no tasks themselves: they count as paused or
-- silent only.
select
  w.fleet, count(*) filter (where w.status = 'spawning' and w.kind <> 'dispatcher') as spawning,
  count(*) filter (where w.status = 'active' and w.kind <> 'dispatcher') as active,
  count(*) filter (where w.status = 'terminating' and w.kind <> 'dispatcher') as terminating,
  count(*) filter (where w.status = 'error' and w.kind <> 'dispatcher') as error,
  count(*) filter (where w.slot is not null) as managed,
  count(*) filter (where w.slot is null and w.kind = 'worker') as by_hand,
  count(*) filter (
    where w.slot is not null and w.status in ('spawning', 'active') and f.planner_state ->> 'fingerprint' is not null
      and w.fingerprint is distinct from f.planner_state ->> 'fingerprint'
  ) as outdated,
  count(*) filter (where w.paused) as paused,
  count(*) filter (where w.status = 'active' and not lease.is_valid) as silent,
  count(*) filter (where ready.can_begin and r.tasks is null) as idle,
  coalesce(
    sum(greatest(0, w.concurrency - coalesce(r.tasks, 0))) filter (where ready.can_begin), 0
  )::bigint as free_slots
from windlass_internal.workers w
join windlass_internal.fleets f on f.name = w.fleet
left join (
  select t.worker_id, count(*) as tasks from windlass_internal.tasks t where t.status = 'running' group by t.worker_id
) as r on r.worker_id = w.id
cross join lateral (
  select w.last_heartbeat >= windlass.now() - make_interval(secs => w.lease_s) as is_valid
) as lease
cross join lateral (
  -- A dispatcher places tasks on nodes and has no slots of its own. Ray places nothing on a dead node.
  select w.status = 'active' and not w.paused and w.kind <> 'dispatcher' and lease.is_valid
    and w.node ->> 'state' is distinct from 'dead' as can_begin
) as ready
where w.status <> 'terminated'
group by w.fleet;

-- name: burn_rates
-- overview; workers_live.
select w.fleet, w.currency, sum(w.price_micros_per_hour)::bigint as micros_per_hour, count(*) as machines
from windlass_internal.workers w where w.status <> 'terminated' and w.billed_since is not null and w.billed_until is null
group by w.fleet, w.currency order by w.fleet, micros_per_hour desc, w.currency;

-- name: fleet_queues
-- Queues that fleets serve. With `known_queues`, all queues.
select distinct unnest(f.queues) as queue from windlass_internal.fleets f;

-- name: workers_by_queue
-- overview; workers_live. Live workers that can run tasks of each queue.
select q.name as queue, count(*) as workers
from windlass_internal.workers w cross join lateral unnest(w.queues) as q (name)
where w.status in ('spawning', 'active') and w.kind <> 'dispatcher' group by q.name;

-- name: last_cycles
-- overview; one probe of cycles_fleet for each fleet.
select f.name as fleet, c.id, coalesce(c.last_decision, c.decision) as decision,
  coalesce(c.repeated_at, c.started_at) as decided_at, c.summary,
  (
    select coalesce(jsonb_object_agg(k.kind, k.count), '{}')
    from (select a.value ->> 'kind' as kind, count(*) as count from jsonb_array_elements(c.plan) as a group by 1) as k
  ) as planned
from windlass_internal.fleets f
cross join lateral (
  select l.id, l.decision, l.last_decision, l.repeated_at, l.started_at, l.plan, l.summary
  from windlass_internal.cycles l where l.fleet = f.name order by l.id desc limit 1
) as c;

-- name: queue_counts
-- overview; tasks_ready and tasks_scheduled of each queue, counted up to $2.
select
  q.name as queue, ready.n + due.n as queued, later.n as scheduled, retrying.n as retrying,
  extract(epoch from windlass.now() - head.since)::float8 as oldest_queued_age_s
from unnest($1::text[]) as q (name)
cross join lateral (
  select count(*) as n from (
    select from windlass_internal.tasks t where t.queue = q.name and t.status = 'queued' and t.run_after is null limit $2
  ) as counted
) as ready
cross join lateral (
  select count(*) as n from (
    select from windlass_internal.tasks t
    where t.queue = q.name and t.status = 'queued' and t.run_after is not null and t.run_after <= windlass.now()
    limit $2
  ) as counted
) as due
cross join lateral (
  select count(*) as n from (
    select from windlass_internal.tasks t
    where t.queue = q.name and t.status = 'queued' and t.run_after is not null and t.run_after > windlass.now()
    limit $2
  ) as counted
) as later
cross join lateral (
  select count(*) as n from (
    select from windlass_internal.tasks t where t.queue = q.name and t.status = 'error' and t.run_after is not null limit $2
  ) as counted
) as retrying
left join lateral (
  -- The oldest of the first 100: the first alone may have been requeued a moment ago.
  select min(first.since) as since from (
    select coalesce(t.ready_at, t.created_at) as since
    from windlass_internal.tasks t where t.queue = q.name and t.status = 'queued' and t.run_after is null
    order by t.priority desc, t.id limit 100
  ) as first
) as head on true;

-- name: running_by_queue
-- overview; tasks_running.
select t.queue, count(*) as running from windlass_internal.tasks t where t.status = 'running' group by t.queue;

-- name: failed_by_queue
-- overview; the newest $1 of tasks_failed, without those that a person cancelled.
select d.queue, count(*) as dead
from (
  select t.queue, t.error_code from windlass_internal.tasks t where t.status = 'failed' order by t.finished_at desc limit $1
) as d
where d.error_code is distinct from 'CANCELLED'
group by d.queue;

-- name: recent_completions
-- overview; tasks_complete of the last $3 seconds: counts the newest $1 and returns the newest $2 of each queue.
-- Waiting times are of first attempts only: a retried task also waited for its back-off. `span_s` is the time in which
-- they were completed: since the first of them started, and at least $4 seconds. `last_minute` counts the last minute.
select
  s.queue, s.completed, s.last_minute,
  least(
    case when s.scanned < $1 then $3::float8 else greatest(1, extract(epoch from windlass.now() - s.oldest))::float8 end,
    greatest($4::float8, extract(epoch from windlass.now() - s.first_started)::float8)
  ) as span_s,
  case when s.attempts = 1 then extract(epoch from s.started_at - coalesce(s.ready_at, s.created_at))::float8 end
    as wait_s,
  extract(epoch from s.finished_at - s.started_at)::float8 as duration_s
from (
  select
    r.*, row_number() over (partition by r.queue order by r.finished_at desc) as place,
    count(*) over (partition by r.queue) as completed, count(*) over () as scanned,
    min(r.finished_at) over () as oldest, min(r.started_at) over (partition by r.queue) as first_started,
    count(*) filter (where r.finished_at > windlass.now() - interval '1 minute') over (partition by r.queue)
      as last_minute
  from (
    select t.queue, t.attempts, t.created_at, t.ready_at, t.started_at, t.finished_at from windlass_internal.tasks t
    where t.status = 'complete' and t.finished_at > windlass.now() - make_interval(secs => $3::float8)
    order by t.finished_at desc limit $1
  ) as r
) as s
where s.place <= $2;

-- name: open_alerts
-- overview; alerts_open, a few rows per fleet and code.
select id, fleet, code, severity, reason, since, seen_at, resolved_at
from windlass_internal.alerts where resolved_at is null order by since, id limit 500;

-- name: leader
-- overview; a few rows. Prefers the orchestrator's lease to those of other lease names.
select l.holder, l.term, extract(epoch from l.expires_at - windlass.now())::float8 as expires_in_s
from windlass_internal.leases l where l.name not like 'ray:%' and l.is_held
order by l.name = 'orchestrator' desc limit 1;

-- name: overview_time
-- overview; primary key backwards.
select windlass.now() as at, coalesce((select max(e.id) from windlass_internal.events e), 0) as last_event_id;

-- name: long_history
-- Charts of days; primary keys of sample_averages, and of samples since the last average. Bounded by retention.
select
  min(s.at) as at,
  avg(s.queued)::float8 as queued, avg(s.running)::float8 as running, avg(s.spawning)::float8 as spawning,
  avg(s.active)::float8 as active, avg(s.terminating)::float8 as terminating, avg(s.error)::float8 as error,
  avg(s.completed_per_minute)::float8 as completed_per_minute, max(s.wait_p95_s)::float8 as wait_p95_s,
  avg(s.burn_micros_per_hour)::float8 as burn_micros_per_hour, max(s.currency) as currency
from (
  select * from windlass_internal.sample_averages a
  where a.fleet = $1 and a.at > windlass.now() - make_interval(secs => $2::float8)
  union all
  select
    r.fleet, r.at, r.queued, r.running, r.spawning, r.active, r.terminating, r.error, r.completed_per_minute,
    r.wait_p95_s, r.burn_micros_per_hour, r.currency
  from windlass_internal.samples r
  where r.fleet = $1 and r.at > windlass.now() - make_interval(secs => $2::float8)
    and r.at >= coalesce(
      (select max(l.at) + interval '5 minutes' from windlass_internal.sample_averages l where l.fleet = $1), '-infinity'
    )
) as s
group by date_bin(make_interval(secs => $3::float8), s.at, 'epoch') order by 1;

-- name: history
-- Charts; primary key of samples, bounded by retention.
select
  min(s.at) as at,
  avg(s.queued)::float8 as queued, avg(s.running)::float8 as running, avg(s.spawning)::float8 as spawning,
  avg(s.active)::float8 as active, avg(s.terminating)::float8 as terminating, avg(s.error)::float8 as error,
  avg(s.completed_per_minute)::float8 as completed_per_minute, max(s.wait_p95_s)::float8 as wait_p95_s,
  avg(s.burn_micros_per_hour)::float8 as burn_micros_per_hour, max(s.currency) as currency
from windlass_internal.samples s where s.fleet = $1 and s.at > windlass.now() - make_interval(secs => $2::float8)
group by date_bin(make_interval(secs => $3::float8), s.at, 'epoch') order by 1;

-- name: fleet_metrics
-- Metrics; for each fleet workers_managed, workers_failed, workers_terminated_by_fleet, and its slots.
select
  f.name as fleet, spawned.success_ratio::float8 as provisioning_success_ratio,
  spawned.mean_s::float8 as provisioning_mean_s, slots.restarts, slots.failed_slots, ended.terminated,
  extract(epoch from windlass.now() - crash.failed_at)::float8 as since_last_crash_s
from windlass_internal.fleets f
cross join lateral (
  select count(*) as terminated
  from (select from windlass_internal.workers w where w.fleet = f.name and w.status = 'terminated' limit 10000) as counted
) as ended
cross join lateral (
  select
    count(h.activated_at)::numeric
      / nullif(count(h.activated_at) + count(*) filter (where h.has_failed), 0) as success_ratio,
    avg(extract(epoch from h.activated_at - h.created_at)) as mean_s
  from (
    select w.activated_at, w.created_at, w.activated_at is null and w.status in ('error', 'terminated') as has_failed
    from windlass_internal.workers w where w.fleet = f.name and w.slot is not null order by w.created_at desc limit 50
  ) as h
) as spawned
cross join lateral (
  select coalesce(sum(s.restart_count), 0) as restarts, count(*) filter (where s.status = 'failed') as failed_slots
  from windlass_internal.slots s where s.fleet = f.name
) as slots
left join lateral (
  select w.failed_at
  from windlass_internal.workers w where w.fleet = f.name and w.failed_at is not null order by w.failed_at desc limit 1
) as crash on true
order by f.name;

-- name: machine_costs
-- Metrics; workers_live.
select
  w.fleet, w.currency,
  sum(w.price_micros_per_hour * extract(epoch from windlass.now() - w.billed_since) / 3600)::bigint as micros
from windlass_internal.workers w where w.status <> 'terminated' and w.billed_since is not null
group by w.fleet, w.currency order by w.fleet, w.currency;

-- name: recent_spending
-- Metrics; spending_hour.
select
  s.fleet, s.currency, sum(s.task_micros)::bigint as task, sum(s.boot_micros)::bigint as boot,
  sum(s.idle_micros)::bigint as idle, sum(s.tail_micros)::bigint as tail
from windlass_internal.spending s where s.hour > windlass.now() - interval '1 day'
group by s.fleet, s.currency order by s.fleet, s.currency;

-- name: live_workers
-- workers_page; workers_by_slot, after the cursor ($3, $4, $5).
select w.id from windlass_internal.workers w
where w.status <> 'terminated' and ($1::text is null or w.fleet = $1) and ($2::text is null or w.status = $2)
  and ($3::text is null or (w.fleet, coalesce(w.slot, 2147483647), w.id) > ($3, $4::integer, $5::text))
order by w.fleet, coalesce(w.slot, 2147483647), w.id limit $6;

-- name: terminated_workers
-- workers_page; workers_terminated_at backwards, after the cursor ($2, $3).
select w.id from windlass_internal.workers w
where w.status = 'terminated' and ($1::text is null or w.fleet = $1)
  and ($2::timestamptz is null or (w.terminated_at <= $2 and (w.terminated_at < $2 or w.id < $3::text)))
order by w.terminated_at desc, w.id desc limit $4;

-- name: worker_rows
-- workers_page and worker_row; primary keys, and tasks_running for each.
select
  w.id, w.fleet, w.slot, w.status, w.paused, w.queues, w.concurrency, w.lease_s, w.created_at, w.activated_at,
  w.last_heartbeat, w.first_claimed_at, w.terminated_at, w.code, w.reason, w.host, w.pid, w.version, w.vram_total_mb,
  w.vram_used_mb, w.late_results, w.metadata, w.instance_type, w.place, w.machine_id, w.terminating_at,
  extract(epoch from windlass.now() - w.last_heartbeat)::float8 as heartbeat_age_s,
  coalesce(
    w.status in ('active', 'terminating') and w.last_heartbeat < windlass.now() - make_interval(secs => w.lease_s),
    false
  ) as is_silent,
  t.running_tasks, r.id as task_id, r.queue as task_queue, r.started_at as task_started_at, r.progress as task_progress,
  r.progress_note as task_note, coalesce(s.restart_count, 0) as restarts,
  coalesce(s.status = 'failed', false) as is_slot_failed,
  w.price_micros_per_hour, w.currency, w.billing_unit_s, w.price_parts, w.billed_since, w.billed_until, w.settled_until,
  w.kind, w.node, w.address, w.machine_host, w.running_at, w.reachable_at, w.joined_at, w.boot_step
from unnest($1::text[]) with ordinality as wanted (id, place)
join windlass_internal.workers w on w.id = wanted.id
left join windlass_internal.slots s on s.fleet = w.fleet and s.slot = w.slot
cross join lateral (
  select count(*) as running_tasks, min(a.id) as oldest_id
  from windlass_internal.tasks a where a.worker_id = w.id and a.status = 'running'
) as t
left join windlass_internal.tasks r on r.id = t.oldest_id
order by wanted.place;

-- name: events_page
-- events_page; events_task, events_worker or the primary key backwards, at most $7 rows.
select s.id, s.at, s.code, s.reason, s.fleet, s.worker_id, s.task_id, s.detail, s.actor,
  (select t.queue from windlass_internal.tasks t where t.id = s.task_id) as queue
from (
  select e.* from windlass_internal.events e
  where ($1::bigint is null or e.task_id = $1) and ($2::text is null or e.worker_id = $2)
    and ($5::bigint is null or e.id < $5)
  order by e.id desc limit $7
) as s
where ($3::text is null or s.fleet = $3) and ($4::text is null or s.code = $4)
order by s.id desc limit $6;

-- name: events_page_end
-- The last row that a search of events_page examined.
select e.id from windlass_internal.events e
where ($1::bigint is null or e.task_id = $1) and ($2::text is null or e.worker_id = $2)
  and ($3::bigint is null or e.id < $3)
order by e.id desc limit 1 offset $4 - 1;

-- name: events_after
-- Event stream; primary key.
select e.id, e.at, e.code, e.reason, e.fleet, e.worker_id, e.task_id, e.detail, e.actor,
  (select t.queue from windlass_internal.tasks t where t.id = e.task_id) as queue
from windlass_internal.events e where e.id > $1 order by e.id limit $2;

-- name: cycles_page
-- cycles_page; cycles_fleet or the primary key backwards.
select id, fleet, term, started_at, finished_at, decision, plan, summary, repeats, repeated_at
from windlass_internal.cycles where ($1::text is null or fleet = $1) and ($2::bigint is null or id < $2)
  and ($4::timestamptz is null or started_at >= $4)
order by id desc limit $3;

-- name: changes_page
-- cycles_page; cycles_changes of one fleet ($1) or of each, backwards, not before $4.
select c.id, c.fleet, c.term, c.started_at, c.finished_at, c.decision, c.plan, c.summary, c.repeats, c.repeated_at
from windlass_internal.fleets f
cross join lateral (
  select l.* from windlass_internal.cycles l
  where l.fleet = f.name and l.is_change and ($2::bigint is null or l.id < $2)
    and ($4::timestamptz is null or l.started_at >= $4)
  order by l.id desc limit $3
) as c
where $1::text is null or f.name = $1
order by c.id desc limit $3;

-- name: logs_page
-- logs_page; logs_worker or the primary key backwards, at most $5 rows.
select s.id, s.at, s.level, s.message, s.worker_id, s.cycle_id, s.fields
from (
  select l.*
  from windlass_internal.logs l where ($1::text is null or l.worker_id = $1) and ($3::bigint is null or l.id < $3)
  order by l.id desc limit $5
) as s
where $2::text is null or s.level = $2
order by s.id desc limit $4;

-- name: logs_page_end
-- The last row that a search of logs_page examined.
select l.id
from windlass_internal.logs l where ($1::text is null or l.worker_id = $1) and ($2::bigint is null or l.id < $2)
order by l.id desc limit 1 offset $3 - 1;

-- name: alerts_page
-- alerts_page; the primary key backwards.
select id, fleet, code, severity, reason, since, seen_at, resolved_at
from windlass_internal.alerts where ($1::boolean is null or (resolved_at is null) = $1) and ($2::bigint is null or id < $2)
order by id desc limit $3;

-- name: component_health
-- GET /api/web/worker/status; workers_live.
select component, status, details_json ->> 'error_message' as error_message, pid, current_job, restart_count, last_seen
from windlass.health order by component collate "C" limit $1;

-- name: ray_dashboards
-- Worker pages; workers_by_slot of each fleet, workers without a slot.
select f.name as fleet, d.url from windlass_internal.fleets f
cross join lateral (
  select w.metadata ->> 'ray_dashboard' as url from windlass_internal.workers w
  where w.fleet = f.name and w.status <> 'terminated' and coalesce(w.slot, 2147483647) = 2147483647
    -- Reported by the worker and shown as a link.
    and w.kind = 'dispatcher' and w.metadata ->> 'ray_dashboard' ~ '^https?://'
  order by w.id desc limit 1
) as d;
