-- Named queries about the boots of machines, for metrics and the dashboard.

-- name: boot_phases
-- Metrics; workers_managed of each fleet, its last 200 spawned workers.
select f.name as fleet, b.id as worker_id, p.phase, p.seconds::float8 as seconds
from windlass_internal.fleets f
cross join lateral (
  select w.id, w.created_at, w.running_at, w.reachable_at, coalesce(w.joined_at, w.activated_at) as joined_at,
    w.first_claimed_at
  from windlass_internal.workers w where w.fleet = f.name and w.slot is not null
  order by w.created_at desc, w.id collate "C" desc limit 200
) as b
cross join lateral (
  values
    ('running', extract(epoch from b.running_at - b.created_at)),
    ('reachable', extract(epoch from b.reachable_at - b.created_at)),
    ('joined', extract(epoch from b.joined_at - b.created_at)),
    ('first_claim', extract(epoch from b.first_claimed_at - b.created_at))
) as p (phase, seconds)
where p.seconds is not null;

-- name: boot_times
-- Metrics; as boot_phases. The page of a fleet; with its name, workers_managed of that fleet only.
select t.fleet, t.phase, t.count, t.p50_s::float8 as p50_s, t.p95_s::float8 as p95_s, t.p99_s::float8 as p99_s
from windlass.boot_times t
where $1::text is null or t.fleet = $1
order by t.fleet, array_position(array['running', 'reachable', 'joined', 'first_claim'], t.phase);
