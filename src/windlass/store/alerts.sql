-- Named queries of store/alerts.py: what alerts are judged by, and what became of messages.

-- name: leaderless_time
-- Since when nobody leads, nor looks after what nobody leads; a handful of rows.
select
  windlass.now() as now,
  (
    select extract(epoch from windlass.now() - max(l.expires_at))::double precision
    from windlass.leases l
    where l.name not like 'ray:%'
    having max(l.expires_at) <= windlass.now()
  ) as leaderless_s;

-- name: planner_alerts
-- What the last plan of each fleet had to tell; a handful of rows.
select f.name as fleet, k.key
from windlass.fleets f
cross join lateral jsonb_object_keys(coalesce(f.planner_state -> 'alerts', '{}')) as k (key)
order by f.name, k.key;

-- name: alert_reasons
-- In what words; events_alert, oldest first, of the newest $2.
select t.fleet, t.key, t.reason
from (
  select
    e.id, e.fleet, e.reason,
    concat_ws(' ', e.detail ->> 'code', coalesce(e.detail ->> 'about', e.worker_id)) as key
  from windlass.events e
  where e.code = 'ALERT'
    and e.at > windlass.now() - make_interval(secs => $1::double precision)
  order by e.at desc
  limit $2
) as t
order by t.id;

-- name: open_alerts
-- What people were told is the matter; alerts_open, a handful of rows: of each fleet and code a few at most.
select fleet, key, code, severity, reason
from windlass.alerts
where resolved_at is null
order by id
limit $1;

-- name: provisioning_timeouts
-- Who was made and never came to work; workers_failed of each fleet. Preparations have codes of their own.
select f.name as fleet, w.id
from windlass.fleets f
cross join lateral (
  select l.id, l.code, l.prepare_code
  from windlass.workers l
  where l.fleet = f.name
    and l.failed_at > windlass.now() - make_interval(secs => $1::double precision)
  order by l.failed_at desc
  limit $2
) as w
where w.code in ('SPAWNING_TIMEOUT', 'NO_HEARTBEAT', 'NODE_NOT_JOINED', 'STARTUP_NEVER_READY')
  or w.code = w.prepare_code
order by f.name, w.id;

-- name: dead_letters
-- What was given up lately; tasks_failed, the newest $2.
select d.queue, count(*) as count
from (
  select t.queue, t.error_code
  from windlass.tasks t
  where t.status = 'failed'
    and t.finished_at > windlass.now() - make_interval(secs => $1::double precision)
  order by t.finished_at desc
  limit $2
) as d
where d.error_code is distinct from 'CANCELLED'
group by d.queue
order by d.queue;

-- name: mark_message_failed
-- Primary key. One that was given up while it was on its way stays so.
update windlass.messages
set error = $2,
    due_at = coalesce(windlass.now() + make_interval(secs => $3::double precision), due_at),
    abandoned_at = coalesce(abandoned_at, case when $3::double precision is null then windlass.now() end)
where id = $1;
