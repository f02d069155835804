-- Named queries about fleets, cycles and costs. Each says who calls it and which index serves it.

-- name: fleets
-- `windlass status`; a few rows.
select
  f.name, f.provider, f.queues, f.min_workers, f.max_workers, f.paused, f.requested_workers, f.created_at,
  nullif(f.planner_state -> 'hold', 'null') as hold,
  nullif(f.planner_state -> 'rollout', 'null') as rollout,
  f.planner_state ->> 'fingerprint' as fingerprint,
  (f.planner_state #>> '{cadence,planned_at}')::timestamptz as planned_at,
  (f.planner_state #>> '{cadence,next_plan_in_s}')::float8 as next_plan_in_s,
  exists (select from windlass_internal.leases l where l.is_held and l.name not like 'ray:%') as is_led,
  array(
    select s.slot from windlass_internal.slots s where s.fleet = f.name and s.status = 'failed' order by s.slot
  ) as failed_slots
from windlass_internal.fleets f
order by f.name collate "C";

-- name: leader
-- `windlass reload`; a few rows.
select l.holder from windlass_internal.leases l where l.name = 'orchestrator' and l.is_held;

-- name: cycles
-- `windlass explain`; scans cycles_fleet backwards up to the limit.
select id, fleet, term, started_at, finished_at, coalesce(last_decision, decision) as decision, plan, summary, repeats,
  repeated_at
from windlass_internal.cycles where fleet = $1
order by id desc limit $2;

-- name: cycle
-- `windlass replay`; primary key.
select id, fleet, term, started_at, finished_at, decision, plan, summary, repeats, repeated_at, snapshot
from windlass_internal.cycles where id = $1;

-- name: last_cycle_of_worker
-- `windlass explain WORKER`; scans cycles_started backwards from the worker's end, or from now. Every cycle observes
-- all live workers of its fleet, so the first cycle usually matches; at most five snapshots are opened.
select c.id, c.fleet, c.term, c.started_at, c.finished_at, c.decision, c.plan, c.summary, c.repeats, c.repeated_at,
  c.snapshot
from windlass_internal.workers w
cross join lateral (
  select * from windlass_internal.cycles l
  where l.fleet = w.fleet
    and l.started_at <= coalesce(w.terminated_at, windlass.now())
  order by l.started_at desc, l.id desc limit 5
) as c
where w.id = $2 and w.fleet = $1
  and exists (select from json_array_elements(c.snapshot -> 'workers') as s where s ->> 'id' = w.id)
order by c.started_at desc, c.id desc limit 1;

-- name: audit
-- `windlass audit` and the audit page; scans events_actor backwards up to the limit.
select id, at, code, reason, fleet, worker_id, task_id, detail, actor from windlass_internal.events
where actor is not null
  and ($1::text is null or actor = $1 or actor like 'token:%' and split_part(actor, '#', 1) = $1)
  and ($2::bigint is null or id < $2)
order by id desc limit $3;

-- name: running_tasks
-- `windlass status`; tasks_running.
select worker_id, array_agg(id order by id) as task_ids from windlass_internal.tasks
where status = 'running'
group by worker_id;

-- name: queues_with_tasks
-- Wakes fleets without workers. Counts as observe_queues does, but only whether there is a task: one probe of
-- tasks_ready and one of tasks_scheduled per queue, and tasks_running of the few dispatchers.
select q.name
from unnest($1::text[]) as q (name)
where exists (
    select from windlass_internal.tasks t where t.queue = q.name and t.status = 'queued' and t.run_after is null
  )
  or exists (
    select from windlass_internal.tasks t
    where t.queue = q.name and t.run_after is not null and t.run_after <= windlass.now()
  )
  or exists (
    select
    from windlass_internal.workers w
    join windlass_internal.tasks t on t.worker_id = w.id and t.status = 'running'
    where w.kind = 'dispatcher' and w.status <> 'terminated' and t.queue = q.name
  );

-- name: tasks_ahead
-- `windlass explain TASK`; counts tasks ahead in tasks_ready, up to $2. Two parts, each a range of the index.
select count(*)
from (
  (
    select
    from windlass_internal.tasks mine
    join windlass_internal.tasks t
      on t.queue = mine.queue and t.status = 'queued' and t.run_after is null and t.priority > mine.priority
    where mine.id = $1
    limit $2
  )
  union all
  (
    select
    from windlass_internal.tasks mine
    join windlass_internal.tasks t
      on t.queue = mine.queue and t.status = 'queued' and t.run_after is null and t.priority = mine.priority
      and t.id < mine.id
    where mine.id = $1
    limit $2
  )
  limit $2
) as counted;

-- name: costs_from_spending
-- `windlass cost --by day|fleet|queue`, the cost page; spending_hour. Charges without a queue have no key.
select
  k.key, s.currency,
  sum(s.task_micros)::bigint as task_micros, sum(s.boot_micros)::bigint as boot_micros,
  sum(s.idle_micros)::bigint as idle_micros, sum(s.tail_micros)::bigint as tail_micros
from windlass_internal.spending s
cross join lateral (
  select
    case $1::text
      when 'day' then to_char(s.hour at time zone 'UTC', 'YYYY-MM-DD')
      when 'queue' then nullif(s.queue, '')
      else s.fleet
    end as key
) as k
where s.hour >= $2
  and ($3::text is null or s.fleet = $3)
group by k.key, s.currency
order by
  case $1::text when 'day' then k.key end desc,
  sum(s.task_micros + s.boot_micros + s.idle_micros + s.tail_micros) desc,
  k.key collate "C",
  s.currency collate "C"
limit $4;

-- name: costs_from_charges
-- `windlass cost --by worker|task`; charges_from. Charges without a task have no key.
select
  k.key, c.currency,
  coalesce(sum(c.amount_micros) filter (where c.kind = 'task'), 0)::bigint as task_micros,
  coalesce(sum(c.amount_micros) filter (where c.kind = 'boot'), 0)::bigint as boot_micros,
  coalesce(sum(c.amount_micros) filter (where c.kind = 'idle'), 0)::bigint as idle_micros,
  coalesce(sum(c.amount_micros) filter (where c.kind = 'tail'), 0)::bigint as tail_micros
from windlass_internal.charges c
cross join lateral (
  select case $1::text when 'worker' then c.worker_id else c.task_id::text end as key
) as k
where c.from_at >= $2
  and ($3::text is null or c.fleet = $3)
group by k.key, c.currency
order by sum(c.amount_micros) desc, k.key collate "C", c.currency collate "C" limit $4;

-- name: costs_spread
-- `windlass cost --by task --spread`; charges_from. Boot, idle and tail of each billing period of a worker are divided
-- among the tasks that ran in it, by their amounts and by largest remainder, so the parts add up to the bill. A period
-- without a task has no key.
with charges as (
  select c.worker_id, c.from_at, c.currency, c.kind, c.task_id, c.amount_micros
  from windlass_internal.charges c
  where c.from_at >= $1 and ($2::text is null or c.fleet = $2)
),
tasks as (
  select t.worker_id, t.from_at, t.currency, t.task_id, t.amount_micros,
    sum(t.amount_micros) over (partition by t.worker_id, t.from_at, t.currency) as of_tasks
  from charges t where t.kind = 'task' and t.amount_micros > 0
),
parts as (
  select
    t.task_id, o.currency, o.kind, o.amount_micros as whole,
    coalesce(div(o.amount_micros::numeric * t.amount_micros, t.of_tasks), o.amount_micros) as part,
    row_number() over (
      partition by o.worker_id, o.from_at, o.currency, o.kind
      order by mod(o.amount_micros::numeric * t.amount_micros, t.of_tasks) desc, t.task_id
    ) as rank,
    o.worker_id, o.from_at
  from charges o
  left join tasks t on (t.worker_id, t.from_at, t.currency) = (o.worker_id, o.from_at, o.currency)
  where o.kind <> 'task'
),
divided as (
  select p.task_id, p.currency, p.kind,
    p.part + case
      when p.rank <= p.whole - sum(p.part) over (partition by p.worker_id, p.from_at, p.currency, p.kind) then 1
      else 0
    end as micros
  from parts p
  union all
  select c.task_id, c.currency, c.kind, c.amount_micros from charges c where c.kind = 'task'
)
select
  d.task_id::text as key, d.currency,
  coalesce(sum(d.micros) filter (where d.kind = 'task'), 0)::bigint as task_micros,
  coalesce(sum(d.micros) filter (where d.kind = 'boot'), 0)::bigint as boot_micros,
  coalesce(sum(d.micros) filter (where d.kind = 'idle'), 0)::bigint as idle_micros,
  coalesce(sum(d.micros) filter (where d.kind = 'tail'), 0)::bigint as tail_micros
from divided d
group by d.task_id, d.currency
order by sum(d.micros) desc, d.task_id::text collate "C" nulls last, d.currency limit $3;

-- name: volume_costs
-- `windlass cost`, the cost route and its page; volume_sizes, which has few rows. Fleets that share a volume record it
-- each: at any moment it is billed once, at the highest price that was seen, because a volume never shrinks.
with seen as (
  select v.volume_id, v.currency, v.price_micros_per_hour, greatest(v.from_at, $1) as from_at, v.until_at
  from windlass_internal.volume_sizes v
  where v.until_at > $1
),
moments as (
  select s.volume_id, s.currency, s.from_at as at from seen s
  union
  select s.volume_id, s.currency, s.until_at from seen s
),
periods as (
  select
    m.volume_id, m.currency, m.at as from_at,
    lead(m.at) over (partition by m.volume_id, m.currency order by m.at) as until_at
  from moments m
),
amounts as (
  select
    p.volume_id, p.currency,
    sum(price.highest * extract(epoch from p.until_at - p.from_at) / 3600) as micros
  from periods p
  cross join lateral (
    select max(s.price_micros_per_hour) as highest
    from seen s
    where s.volume_id = p.volume_id and s.currency = p.currency
      and s.from_at <= p.from_at and s.until_at >= p.until_at
  ) as price
  group by p.volume_id, p.currency
)
select
  v.volume_id, array_agg(distinct v.fleet order by v.fleet) as fleets,
  (array_agg(v.size_gb order by v.from_at desc))[1] as size_gb, v.currency,
  round(coalesce(a.micros, 0))::bigint as amount_micros,
  (array_agg(v.price_micros_per_hour order by v.from_at desc))[1] as price_micros_per_hour
from windlass_internal.volume_sizes v
join amounts a using (volume_id, currency)
where v.until_at > $1
group by v.volume_id, v.currency, a.micros
having $2::text is null or bool_or(v.fleet = $2)
order by v.volume_id, v.currency limit 1000;

-- name: machine_places
-- `windlass workers hosts --by place` and the page of a fleet; the view machine_hosts, all hosts of a place in one row.
select h.fleet, h.place, null::text as host, sum(h.machines)::bigint as machines, sum(h.lost)::bigint as lost,
  sum(h.failed_checks)::bigint as failed_checks, max(h.last_used_at) as last_used_at
from windlass.machine_hosts h
where $1::text is null or h.fleet = $1
group by h.fleet, h.place
order by h.fleet, sum(h.lost + h.failed_checks) desc, sum(h.machines) desc, h.place limit 1000;

-- name: machine_hosts
-- `windlass workers hosts`; the view machine_hosts.
select h.fleet, h.place, h.host, h.machines, h.lost, h.failed_checks, h.last_used_at
from windlass.machine_hosts h
where $1::text is null or h.fleet = $1
order by h.fleet, h.lost + h.failed_checks desc, h.machines desc, h.place, h.host limit 1000;

-- name: charges_of_task
-- `windlass tasks show`; charges_task.
select worker_id, fleet, kind, from_at, until_at, amount_micros, currency, task_id, queue
from windlass_internal.charges where task_id = $1
order by from_at, worker_id collate "C";
