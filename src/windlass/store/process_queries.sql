-- Named queries about processes, counters and requested cycles. Each says who calls it and which index serves it.

-- name: record_process
-- `windlass up` and `serve`, each process every few seconds; primary key.
insert into windlass.processes as p (id, kind, number, host, pid, version, url, ray_head, gauges)
values ($1, $2, $3, $4, $5, $6, $7, $8::jsonb, $9::jsonb)
on conflict (id) do update
  set url = excluded.url, ray_head = excluded.ray_head, gauges = excluded.gauges, seen_at = excluded.seen_at;

-- name: processes
-- `windlass tokens link`, metrics, joining machines of Ray fleets; a few rows.
select id, kind, number, host, pid, version, url, ray_head, gauges from windlass.processes
where seen_at > windlass.now() - make_interval(secs => $1::float8)
order by seen_at desc, id;

-- name: remove_process
-- A process that stops, and the successor of one that died; primary key.
delete from windlass.processes where id = $1;

-- name: add_counters
-- Each process every few seconds; primary key. In the order of the key, so that two processes never wait for each other.
insert into windlass.counters as c (name, labels, value)
select a.name, array(select jsonb_array_elements_text(a.labels)) as labels, a.value
from jsonb_to_recordset($1::jsonb) as a (name text, labels jsonb, value double precision)
order by a.name, array(select jsonb_array_elements_text(a.labels))
on conflict (name, labels) do update
  set value = c.value + excluded.value, updated_at = excluded.updated_at;

-- name: counters
-- Metrics; some dozen rows per fleet. The limit protects the server from a table that others filled.
select name, labels, value from windlass.counters order by name, labels limit $1;

-- name: request_cycle
-- `POST /internal/cycle`; cycle_requests_open. None if $1 requests are open that are younger than $2 seconds.
with added as (
  insert into windlass.cycle_requests (summaries)
  select null
  where (
    select count(*) from windlass.cycle_requests o
    where o.summaries is null and o.requested_at > windlass.now() - make_interval(secs => $2::float8)
  ) < $1
  returning id
)
select a.id, pg_notify('windlass_cycle_requests', '') from added a;

-- name: cycle_answer
-- `POST /internal/cycle`, several times a second until it is answered; primary key.
select summaries from windlass.cycle_requests where id = $1;

-- name: withdraw_cycle_request
-- `POST /internal/cycle` after its answer, or without one; primary key.
delete from windlass.cycle_requests where id = $1;

-- name: open_cycle_requests
-- Control processes, after a notification and every few seconds; cycle_requests_open.
select id from windlass.cycle_requests
where summaries is null
  and requested_at > windlass.now() - make_interval(secs => $1::float8)
order by id;

-- name: answer_cycle_requests
-- Control processes; primary key.
update windlass.cycle_requests set summaries = $2::jsonb
where id = any ($1) and summaries is null;

-- name: last_actions
-- `GET /api/v1/status`; one probe of cycles_fleet for each fleet. A cycle that repeats the last decision has no actions.
select f.name as fleet, case when c.repeats = 0 then c.summary end as actions from windlass.fleets f
cross join lateral (
  select l.summary, l.repeats from windlass.cycles l where l.fleet = f.name order by l.id desc limit 1
) as c;
