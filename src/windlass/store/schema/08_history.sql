-- What simulations need of the past: arrivals and durations of tasks; boots, prices, refusals and crashes of machines.
--
-- Finished tasks and terminated workers are this history themselves, as long as their rows exist. When rows are deleted
-- (retention, a purge, or the owner's own statement), triggers keep a compact record in the same transaction. So no
-- arrival is lost or counted twice, and neither claims nor completions write anything more.

-- Deleted finished tasks of one queue, at most 1,000 per row. The two arrays belong together.
create table windlass.task_history (
  id bigint generated always as identity primary key,
  queue text not null,
  -- Arrivals are relative to this time, in hundredths of a second: at most 248 days earlier or later.
  base_at timestamptz not null,
  -- The latest arrival.
  until_at timestamptz not null,
  tasks integer not null,
  arrivals_cs integer[] not null,
  -- Of the last attempt.
  durations_s real[] not null
);
create index task_history_queue on windlass.task_history (queue, id);
create index task_history_until on windlass.task_history (until_at);

-- Deleted workers that the control plane had spawned: one narrow row per machine.
create table windlass.machine_history (
  id bigint generated always as identity primary key,
  fleet text not null,
  requested_at timestamptz not null,
  -- Null: it was refused, or never became ready.
  boot_s real,
  -- When its start was cancelled, because another machine was ready first: its boot would have taken longer.
  cancelled_s real,
  lived_s real not null,
  is_refused boolean not null,
  -- It failed after it was ready.
  is_crashed boolean not null,
  price_micros_per_hour bigint,
  currency text,
  billing_unit_s integer
);
create index machine_history_fleet on windlass.machine_history (fleet, requested_at);
create index machine_history_requested on windlass.machine_history (requested_at);

create function windlass_internal.keep_task_history() returns trigger
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_part record;
begin
  for v_part in
    select
      f.queue, min(f.arrived_at) as base_at, max(f.arrived_at) as until_at, count(*)::integer as tasks,
      array_agg(f.arrived_at order by f.number) as arrivals, array_agg(f.duration_s order by f.number) as durations_s
    from (
      select
        g.queue::text as queue, coalesce(g.ready_at, g.created_at) as arrived_at,
        greatest(0, extract(epoch from g.finished_at - g.started_at))::real as duration_s,
        row_number() over (partition by g.queue order by coalesce(g.ready_at, g.created_at), g.id) as number
      from gone g
      where g.status in ('complete', 'failed') and g.started_at is not null and g.finished_at is not null
    ) as f
    group by f.queue, (f.number - 1) / 1000
    order by f.queue
  loop
    -- Appended to the newest row of the queue while that is small. Another transaction's row is skipped, not awaited.
    update windlass.task_history h
    set until_at = greatest(h.until_at, v_part.until_at), tasks = h.tasks + v_part.tasks,
      arrivals_cs = h.arrivals_cs || windlass_internal.offsets_cs(h.base_at, v_part.arrivals),
      durations_s = h.durations_s || v_part.durations_s
    where h.tasks + v_part.tasks <= 1000
      and h.id = (
        select n.id from windlass.task_history n where n.queue = v_part.queue
        order by n.id desc limit 1 for update skip locked
      );
    if not found then
      insert into windlass.task_history (queue, base_at, until_at, tasks, arrivals_cs, durations_s)
      values (v_part.queue, v_part.base_at, v_part.until_at, v_part.tasks,
        windlass_internal.offsets_cs(v_part.base_at, v_part.arrivals), v_part.durations_s);
    end if;
  end loop;
  return null;
end
$$;

create function windlass_internal.offsets_cs(p_base timestamptz, p_times timestamptz[]) returns integer[]
language sql immutable
as $$
  select array_agg(
    least(greatest(round(extract(epoch from t.at - p_base) * 100), -2147483647), 2147483647)::integer order by t.number)
  from unnest(p_times) with ordinality as t (at, number)
$$;

create trigger keep_history
  after delete on windlass.tasks
  referencing old table as gone
  for each statement execute function windlass_internal.keep_task_history();

create function windlass_internal.keep_machine_history() returns trigger
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  insert into windlass.machine_history (
    fleet, requested_at, boot_s, cancelled_s, lived_s, is_refused, is_crashed, price_micros_per_hour, currency,
    billing_unit_s)
  select g.fleet, g.requested_at, g.boot_s, g.cancelled_s, g.lived_s, g.is_refused, g.is_crashed,
    g.price_micros_per_hour, g.currency, g.billing_unit_s
  from gone w
  cross join lateral windlass_internal.machine_record(w) as g
  where w.slot is not null;
  return null;
end
$$;

-- A worker as a row of machine_history.
create function windlass_internal.machine_record(p_worker windlass.workers) returns windlass.machine_history
language sql stable
as $$
  select
    null::bigint, p_worker.fleet, p_worker.created_at,
    case when p_worker.activated_at is not null
      then greatest(0, extract(epoch from p_worker.activated_at - p_worker.created_at))::real end,
    case when p_worker.activated_at is null and p_worker.code = 'START_CANCELLED'
      then greatest(0, extract(epoch from p_worker.terminating_at - p_worker.created_at))::real end,
    greatest(0, extract(epoch from coalesce(p_worker.terminated_at, windlass.now()) - p_worker.created_at))::real,
    coalesce(p_worker.creation = 'refused', false),
    p_worker.failed_at is not null and p_worker.activated_at is not null,
    p_worker.price_micros_per_hour, p_worker.currency, p_worker.billing_unit_s
$$;

create trigger keep_history
  after delete on windlass.workers
  referencing old table as gone
  for each statement execute function windlass_internal.keep_machine_history();

-- Tasks of these queues that arrived in a range of time, the newest p_limit of them, in any order: kept rows, and tasks
-- that are not deleted yet. Each row has up to thousands of tasks, with arrivals in seconds after p_since. Indexes
-- task_history_queue, tasks_complete and tasks_failed: a finished task arrived before it finished.
create function windlass_internal.read_task_history(
  p_queues text[], p_since timestamptz, p_until timestamptz, p_limit integer
) returns table (queue text, arrivals_s double precision[], durations_s real[])
language sql stable
set enable_seqscan = off
as $$
  with live as (
    select t.queue::text as queue, coalesce(t.ready_at, t.created_at) as arrived_at,
      greatest(0, extract(epoch from t.finished_at - t.started_at))::real as duration_s
    from (
      (
        select * from windlass.tasks c
        where c.status = 'complete' and c.finished_at >= p_since and c.queue = any (p_queues)
          and c.started_at is not null
        order by c.finished_at desc limit p_limit
      )
      union all
      (
        select * from windlass.tasks f
        where f.status = 'failed' and f.finished_at >= p_since and f.queue = any (p_queues)
          and f.started_at is not null
        order by f.finished_at desc limit p_limit
      )
    ) as t
  ),
  kept as (
    select h.queue, h.base_at + make_interval(secs => a.arrival_cs / 100.0) as arrived_at, a.duration_s
    from windlass.task_history h
    cross join unnest(h.arrivals_cs, h.durations_s) as a (arrival_cs, duration_s)
    where h.queue = any (p_queues) and h.until_at >= p_since
  ),
  newest as (
    select b.queue, b.arrived_at, b.duration_s
    from (select * from live union all select * from kept) as b
    where b.arrived_at >= p_since and b.arrived_at < p_until
    order by b.arrived_at desc limit p_limit
  )
  select n.queue, array_agg(extract(epoch from n.arrived_at - p_since)::double precision), array_agg(n.duration_s)
  from newest n
  group by n.queue
$$;

-- Machines of a fleet that were requested in a range of time, newest first. Indexes workers_managed and
-- machine_history_fleet.
create function windlass_internal.read_machine_history(
  p_fleet text, p_since timestamptz, p_until timestamptz, p_limit integer
) returns setof windlass.machine_history
language sql stable
set enable_seqscan = off
as $$
  select b.*
  from (
    select r.* from windlass.workers w
    cross join lateral windlass_internal.machine_record(w) as r
    where w.fleet = p_fleet and w.slot is not null and w.created_at >= p_since and w.created_at < p_until
    union all
    select h.* from windlass.machine_history h
    where h.fleet = p_fleet and h.requested_at >= p_since and h.requested_at < p_until
  ) as b
  order by b.requested_at desc limit p_limit
$$;

-- Delete history older than p_history_s, and the oldest rows beyond p_max_tasks tasks. Returns the number of deleted
-- rows, at most p_limit of each kind.
create function windlass_internal.sweep_history(
  p_history_s double precision, p_max_tasks double precision, p_limit integer default 1000
) returns integer
language plpgsql
as $$
declare
  v_oldest timestamptz := windlass.now() - make_interval(secs => p_history_s);
  v_deleted integer := 0;
  v_count integer;
begin
  delete from windlass.task_history where id = any (array(
    select o.id
    from (
      select h.id, h.until_at, sum(h.tasks) over (order by h.id desc) as newer from windlass.task_history h
    ) as o
    where o.until_at < v_oldest or o.newer > p_max_tasks
    order by o.id limit p_limit
  ));
  get diagnostics v_count = row_count;
  v_deleted := v_deleted + v_count;

  delete from windlass.machine_history where id = any (array(
    select h.id from windlass.machine_history h where h.requested_at < v_oldest order by h.requested_at limit p_limit
  ));
  get diagnostics v_count = row_count;
  return v_deleted + v_count;
end
$$;
