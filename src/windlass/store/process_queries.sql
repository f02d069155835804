-- Named queries about processes, counters and requested cycles. Each says who calls it and which index serves it.

-- name: processes
-- `windlass tokens link`, metrics, joining machines of Ray fleets; a few rows.
select id, kind, number, host, pid, version, url, ray_head, gauges from windlass_internal.processes
where seen_at > windlass.now() - make_interval(secs => $1::float8)
order by seen_at desc, id;

-- name: counters
-- Metrics; some dozen rows per fleet. The limit protects the server from a table that others filled.
select name, labels, value from windlass_internal.counters order by name, labels limit $1;

-- name: cycle_answer
-- `POST /internal/cycle`, several times a second until it is answered; primary key.
select summaries from windlass_internal.cycle_requests where id = $1;

-- name: open_cycle_requests
-- Control processes, after a notification and every few seconds; cycle_requests_open.
select id from windlass_internal.cycle_requests
where summaries is null
  and requested_at > windlass.now() - make_interval(secs => $1::float8)
order by id;

-- name: last_actions
-- `GET /api/v1/status`; one probe of cycles_fleet for each fleet. A cycle that repeats the last decision has no actions.
select f.name as fleet, case when c.repeats = 0 then c.summary end as actions from windlass_internal.fleets f
cross join lateral (
  select l.summary, l.repeats from windlass_internal.cycles l where l.fleet = f.name order by l.id desc limit 1
) as c;
