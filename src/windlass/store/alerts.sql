-- Named queries of store/alerts.py: inputs of the alert rules, and outcomes of messages.

-- name: leaderless_time
-- How long there has been no leader; a few rows.
select
  windlass.now() as now,
  (
    select extract(epoch from windlass.now() - max(least(l.expires_at, windlass.now())))::float8
    from windlass_internal.leases l where l.name not like 'ray:%'
    having not bool_or(l.is_held)
  ) as leaderless_s;

-- name: planner_alerts
-- Alerts of the last plan of each fleet; a few rows.
select f.name as fleet, k.key from windlass_internal.fleets f
cross join lateral jsonb_object_keys(coalesce(f.planner_state -> 'alerts', '{}')) as k (key)
order by f.name, k.key;

-- name: alert_reasons
-- Reasons of the planner's alerts; the newest $2 of events_alert, oldest first.
select t.fleet, t.key, t.reason
from (
  select
    e.id, e.fleet, e.reason,
    concat_ws(' ', e.detail ->> 'code', coalesce(e.detail ->> 'about', e.worker_id)) as key
  from windlass_internal.events e
  where e.code = 'ALERT'
    and e.at > windlass.now() - make_interval(secs => $1::float8)
  order by e.at desc limit $2
) as t
order by t.id;

-- name: open_alerts
-- Open alerts; alerts_open, a few rows per fleet and code.
select fleet, key, code, severity, reason from windlass_internal.alerts
where resolved_at is null
order by id limit $1;

-- name: provisioning_timeouts
-- Workers whose machine was created and that never started to work; workers_failed of each fleet. Failed preparations
-- have their own codes.
select f.name as fleet, w.id from windlass_internal.fleets f
cross join lateral (
  select l.id, l.code, l.prepare_code from windlass_internal.workers l
  where l.fleet = f.name and l.failed_at > windlass.now() - make_interval(secs => $1::float8)
  order by l.failed_at desc limit $2
) as w
where w.code in ('SPAWNING_TIMEOUT', 'NO_HEARTBEAT', 'NODE_NOT_JOINED', 'STARTUP_NEVER_READY')
  or w.code = w.prepare_code
order by f.name, w.id;

-- name: failed_tasks
-- Recently failed tasks by queue; the newest $2 of tasks_failed.
select d.queue, count(*) as count
from (
  select t.queue, t.error_code from windlass_internal.tasks t
  where t.status = 'failed' and t.finished_at > windlass.now() - make_interval(secs => $1::float8)
  order by t.finished_at desc limit $2
) as d
where d.error_code is distinct from 'CANCELLED'
group by d.queue order by d.queue;

-- name: rejected_rows
-- Rows of adopted tables that were refused, by table; at most $1 of deferred_rows_rejected.
select a.name, format('%s.%s', a.table_schema, a.table_name) as table, count(distinct d.row_key) as count
from (
  select r.adoption, r.row_key from windlass_internal.deferred_rows r
  where r.is_rejected
  limit $1
) as d
join windlass_internal.adoptions a on a.name = d.adoption
group by a.name, a.table_schema, a.table_name
order by a.name;
