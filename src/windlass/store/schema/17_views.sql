-- Views for people and dashboards. They are computed, not stored.

-- All tasks for producers: everything but the tokens of claims.
create view windlass.task_details as
select
  t.id, t.queue, t.status, t.priority, t.attempts, t.max_attempts, t.timeout_s, t.run_after, t.created_at, t.ready_at,
  t.started_at, t.finished_at, t.worker_id, t.unique_key, t.progress, t.progress_note, t.error_code, t.error, t.owner,
  t.payload, t.result
from windlass.tasks t;

-- What was applied to this database, for programs that check their version.
create view windlass.schema_history as
select m.version, m.name, m.checksum, m.applied_at from windlass.migrations m;

-- Per queue: queued, scheduled, retrying and running tasks. Finished tasks are not counted, so it stays cheap.
create view windlass.queue_depth as
select
  t.queue,
  count(*) filter (where t.status = 'queued' and (t.run_after is null or t.run_after <= windlass.now())) as queued,
  count(*) filter (where t.status = 'queued' and t.run_after > windlass.now()) as scheduled,
  count(*) filter (where t.status = 'error') as retrying,
  count(*) filter (where t.status = 'running') as running,
  -- A task is claimable from the latest of these times.
  extract(epoch from windlass.now() - min(greatest(t.created_at, t.ready_at, t.run_after)) filter (
    where t.status = 'queued' and (t.run_after is null or t.run_after <= windlass.now())
  )) as oldest_queued_age_s
from windlass.tasks t
where (t.status = 'queued' and t.run_after is null)
  or t.run_after is not null
  or t.status = 'running'
group by t.queue;

-- One row: tasks, workers by status, and the results of the last hour.
create view windlass.orchestrator_status as
select
  windlass.now() as at,
  q.queued as queued_tasks,
  q.running as running_tasks,
  q.retrying as delayed_tasks,
  q.oldest_queued_age_s, f.completed_last_hour, f.failed_last_hour,
  w.spawning as spawning_workers,
  w.active as active_workers,
  w.terminating as terminating_workers,
  w.error as error_workers,
  w.total as total_workers,
  w.stale as stale_workers
from (
  select
    coalesce(sum(d.queued), 0)::bigint as queued,
    coalesce(sum(d.running), 0)::bigint as running,
    coalesce(sum(d.retrying + d.scheduled), 0)::bigint as retrying,
    max(d.oldest_queued_age_s) as oldest_queued_age_s
  from windlass.queue_depth d
) as q
cross join (
  select
    (
      select count(*) from windlass.tasks t
      where t.status = 'complete' and t.finished_at > windlass.now() - interval '1 hour'
    ) as completed_last_hour,
    (
      select count(*) from windlass.tasks t
      where t.status = 'failed' and t.finished_at > windlass.now() - interval '1 hour'
        and t.error_code is distinct from 'CANCELLED'
    ) as failed_last_hour
) as f
cross join (
  select
    count(*) filter (where v.status = 'spawning') as spawning,
    count(*) filter (where v.status = 'active') as active,
    count(*) filter (where v.status = 'terminating') as terminating,
    count(*) filter (where v.status = 'error') as error,
    count(*) as total,
    count(*) filter (
      where v.status = 'active' and v.last_heartbeat < windlass.now() - make_interval(secs => v.lease_s)
    ) as stale
  from windlass.workers v where v.status <> 'terminated'
) as w;

-- Per fleet: workers by status. Terminated ones are counted as long as their rows are kept; see terminations.
create view windlass.worker_counts as
select
  w.fleet,
  count(*) filter (where w.status = 'spawning') as spawning,
  count(*) filter (where w.status = 'active') as active,
  count(*) filter (where w.status = 'terminating') as terminating,
  count(*) filter (where w.status = 'error') as error,
  count(*) filter (where w.status = 'terminated') as terminated,
  count(*) filter (where w.status = 'terminated' and w.terminated_at > windlass.now() - interval '1 hour')
    as terminated_last_hour
from windlass.workers w
group by w.fleet;

-- Workers that terminated in the last day, and why: idle, end of a billing hour, by hand, or a failure. Newest first.
create view windlass.terminations as
select
  w.id as worker_id,
  w.fleet, w.slot, w.created_at, w.activated_at, w.terminated_at,
  extract(epoch from w.terminated_at - w.created_at) as lifetime_s,
  w.code, w.reason
from windlass.workers w
where w.status = 'terminated'
  and w.terminated_at > windlass.now() - interval '1 day'
order by w.terminated_at desc;

-- What workers and their handlers printed, one row per line. Filter by worker_id or task_id.
create view windlass.worker_log_lines as
select
  l.id as chunk_id, e.place as line_number, l.worker_id, l.task_id, l.attempt, l.source,
  l.at - make_interval(secs => coalesce(l.ages_ms[e.place], 0) / 1000.0) as at, e.line
from windlass.worker_logs l
cross join lateral unnest(string_to_array(l.body, E'\n')) with ordinality as e (line, place);

-- What is known about workers that failed or terminated.
create view windlass.worker_diagnostics as
select w.id as worker_id, w.fleet, w.status, d.at, d.diagnostics
from windlass.diagnostics d join windlass.workers w on w.id = d.worker_id;

-- Per queue and minute of the last hour: tasks that were completed or failed permanently. Minutes without any are left
-- out.
create view windlass.processing_rate as
select
  t.queue,
  date_trunc('minute', t.finished_at) as minute,
  count(*) filter (where t.status = 'complete') as completed,
  count(*) filter (where t.status = 'failed') as failed
from (
  select c.queue, c.status, c.finished_at from windlass.tasks c
  where c.status = 'complete' and c.finished_at > windlass.now() - interval '1 hour'
  union all
  select f.queue, f.status, f.finished_at from windlass.tasks f
  where f.status = 'failed' and f.finished_at > windlass.now() - interval '1 hour'
    and f.error_code is distinct from 'CANCELLED'
) as t
group by t.queue, date_trunc('minute', t.finished_at);

-- Per worker that is not terminated: age of its heartbeat, running tasks, GPU memory.
create view windlass.active_workers_health as
select
  w.id as worker_id,
  w.fleet, w.slot, w.status, w.paused, w.created_at, w.last_heartbeat,
  extract(epoch from windlass.now() - w.last_heartbeat) as heartbeat_age_s,
  coalesce(w.last_heartbeat < windlass.now() - make_interval(secs => w.lease_s), false) as is_stale,
  w.vram_total_mb, w.vram_used_mb,
  round(100.0 * w.vram_used_mb / nullif(w.vram_total_mb, 0), 1) as vram_used_percent,
  extract(epoch from windlass.now() - w.vram_at) as vram_age_s,
  t.running_tasks, t.oldest_task_id, t.oldest_task_age_s
from windlass.workers w
cross join lateral (
  select
    count(*) as running_tasks,
    min(r.id) as oldest_task_id,
    extract(epoch from windlass.now() - min(r.started_at)) as oldest_task_age_s
  from windlass.tasks r
  where r.worker_id = w.id
    and r.status = 'running'
) as t
where w.status <> 'terminated';

-- Per spawned worker: the moments of its boot, and the seconds from the request to each of them.
create view windlass.boot_phases as
select
  w.id as worker_id,
  w.fleet, w.provider, w.place, w.status, w.code, w.boot_step,
  w.created_at as requested_at,
  w.running_at, w.reachable_at,
  coalesce(w.joined_at, w.activated_at) as joined_at,
  w.first_claimed_at,
  extract(epoch from w.running_at - w.created_at) as running_s,
  extract(epoch from w.reachable_at - w.created_at) as reachable_s,
  extract(epoch from coalesce(w.joined_at, w.activated_at) - w.created_at) as joined_s,
  extract(epoch from w.first_claimed_at - w.created_at) as first_claim_s
from windlass.workers w
where w.slot is not null;

-- Per fleet and phase: boot times of its last 200 spawned workers.
create view windlass.boot_times as
select
  f.name::text as fleet, p.phase, count(*) as count,
  percentile_cont(0.5) within group (order by p.seconds) as p50_s,
  percentile_cont(0.95) within group (order by p.seconds) as p95_s,
  percentile_cont(0.99) within group (order by p.seconds) as p99_s
from windlass.fleets f
cross join lateral (
  select w.created_at, w.running_at, w.reachable_at, coalesce(w.joined_at, w.activated_at) as joined_at,
    w.first_claimed_at
  from windlass.workers w where w.fleet = f.name and w.slot is not null
  order by w.created_at desc, w.id collate "C" desc limit 200
) as b
cross join lateral (
  values
    ('running', extract(epoch from b.running_at - b.created_at)),
    ('reachable', extract(epoch from b.reachable_at - b.created_at)),
    ('joined', extract(epoch from b.joined_at - b.created_at)),
    ('first_claim', extract(epoch from b.first_claimed_at - b.created_at))
) as p (phase, seconds)
where p.seconds is not null
group by f.name, p.phase;

-- Per fleet, place and physical host, where the provider tells it: machines, those that were lost (taken away by the
-- provider, or stopped), and those that failed checks which depend on the host.
create view windlass.machine_hosts as
select
  w.fleet, w.place,
  w.machine_host as host,
  count(*) as machines,
  count(*) filter (where w.code = 'MACHINE_GONE') as lost,
  count(*) filter (
    where w.code in ('GPU_NOT_DETECTED', 'STORAGE_NOT_MOUNTED', 'DISK_FULL', 'SSH_UNREACHABLE')
  ) as failed_checks,
  max(w.created_at) as last_used_at
from windlass.workers w
where w.slot is not null and w.machine_id is not null and w.place is not null
group by w.fleet, w.place, w.machine_host;

-- Per worker: results and duration of its attempts, and its uptime. Failed attempts are counted from events, because a
-- task's row keeps only its last worker.
create view windlass.worker_performance as
select
  w.id as worker_id,
  w.fleet, w.status,
  coalesce(t.completed, 0) as completed_tasks,
  coalesce(e.failed, 0) as failed_attempts,
  round(100.0 * t.completed / nullif(t.completed + coalesce(e.failed, 0), 0), 1) as success_percent,
  t.duration_p50_s, t.duration_mean_s, w.late_results,
  extract(epoch from coalesce(w.terminated_at, windlass.now()) - w.created_at) as uptime_s
from windlass.workers w
left join (
  select
    d.worker_id,
    count(*) as completed,
    percentile_cont(0.5) within group (order by extract(epoch from d.finished_at - d.started_at)) as duration_p50_s,
    avg(extract(epoch from d.finished_at - d.started_at)) as duration_mean_s
  from windlass.tasks d where d.status = 'complete'
  group by d.worker_id
) as t on t.worker_id = w.id
left join (
  select v.worker_id, count(*) as failed from windlass.events v
  where v.code in ('TASK_ERROR', 'TASK_FAILED', 'TASK_REQUEUED')
  group by v.worker_id
) as e on e.worker_id = w.id;

-- Errors of the last day, newest first. The text of a handler's error may quote its payload, which the role of viewers
-- may not read. So only callers that may enter windlass_internal, as in is_trusted, see it; others see the attempt and
-- the error code.
create view windlass.recent_errors as
select e.id, e.at, e.code,
  case
    when h.is_hidden then coalesce(substring(e.reason from '^attempt \d+ of \d+: '), '') || '********'
    else e.reason
  end as reason,
  e.fleet, e.worker_id, e.task_id,
  case
    when h.is_hidden then (
      select jsonb_object_agg(d.key, d.value) from jsonb_each(e.detail) as d
      where d.key in ('attempt', 'started_at', 'error_code', 'code')
    )
    else e.detail
  end as detail
from windlass.events e
cross join lateral (
  select e.task_id is not null and e.code <> 'LATE_RESULT' and not has_schema_privilege(
    case current_setting('role') when 'none' then session_user else current_setting('role')::name end,
    'windlass_internal', 'usage') as is_hidden
) as h
where e.code in ('TASK_ERROR', 'TASK_FAILED', 'TASK_REQUEUED', 'LATE_RESULT', 'WORKER_LOST', 'WORKER_ERROR')
  and e.at > windlass.now() - interval '1 day'
order by e.id desc;

-- Runtime times price per worker: an estimate while the worker lives. `charges` has the settled costs.
create view windlass.cost_estimates as
select
  w.id as worker_id,
  w.fleet, w.instance_type, w.currency, w.price_micros_per_hour,
  extract(epoch from r.until_at - r.from_at) as runtime_s,
  (w.price_micros_per_hour * extract(epoch from r.until_at - r.from_at) / 3600)::bigint as cost_micros
from windlass.workers w
cross join lateral (
  select
    coalesce(w.billed_since, w.created_at) as from_at,
    coalesce(w.billed_until, w.terminated_at, windlass.now()) as until_at
) as r
where w.price_micros_per_hour is not null;

-- Settled costs by day (UTC) and fleet.
create view windlass.daily_costs as
select
  (s.hour at time zone 'UTC')::date as day,
  s.fleet, s.currency,
  sum(s.task_micros)::bigint as task_micros,
  sum(s.boot_micros)::bigint as boot_micros,
  sum(s.idle_micros)::bigint as idle_micros,
  sum(s.tail_micros)::bigint as tail_micros,
  sum(s.task_micros + s.boot_micros + s.idle_micros + s.tail_micros)::bigint as total_micros
from windlass.spending s
group by 1, 2, 3;

-- Settled costs by task: all its attempts on all workers.
create view windlass.task_costs as
select c.task_id, c.queue, c.currency, sum(c.amount_micros)::bigint as cost_micros
from windlass.charges c where c.task_id is not null
group by c.task_id, c.queue, c.currency;
