-- What a cycle observes of the queues of a fleet.

-- The queued tasks of each queue: ready and due, each counted up to p_limit. Indexes tasks_ready and tasks_scheduled.
create function windlass_internal.count_queued(p_queues text[], p_now timestamptz, p_limit integer)
returns table (queue text, queued bigint)
language sql stable
as $$
  select q.name, ready.n + due.n
  from (select distinct p.name from unnest(p_queues) as p (name)) as q
  cross join lateral (
    select count(*) as n from (
      select from windlass.tasks t
      where t.queue = q.name and t.status = 'queued' and t.run_after is null
      limit p_limit
    ) as counted
  ) as ready
  cross join lateral (
    select count(*) as n from (
      select from windlass.tasks t
      where t.queue = q.name and t.run_after is not null and t.run_after <= p_now
      limit p_limit
    ) as counted
  ) as due
$$;

-- Durations of the newest p_limit deleted tasks of these queues, from at most 200 of each of the newest 4 rows of
-- task_history: the durations of failed tasks, too. Index task_history_queue.
create function windlass_internal.remembered_durations(p_queues text[], p_limit integer)
returns table (duration_s double precision)
language sql stable
set enable_seqscan = off
set enable_bitmapscan = off
as $$
  select d.duration_s
  from (
    select h.*
    from unnest(p_queues) as q (name)
    cross join lateral (
      select k.id, k.until_at, k.durations_s from windlass.task_history k
      where k.queue = q.name
      order by k.id desc limit 2
    ) as h
    order by h.until_at desc, h.id desc limit 4
  ) as r
  cross join unnest(r.durations_s[greatest(1, cardinality(r.durations_s) - 199):]) with ordinality as d (
    duration_s, number
  )
  order by r.until_at desc, r.id desc, d.number desc limit p_limit
$$;

-- The queues with queued or running tasks, and a sample of the newest 100 durations of each. p_queued: the queued tasks
-- of each of p_queues. At most 32 queues, those with most tasks. The samples come from the newest 5,000 completed tasks
-- of all queues (index tasks_complete). A queue with fewer than 8 of them, the least that `adaptive` reads, has those of
-- deleted tasks as well.
create function windlass_internal.observe_each_queue(p_queues text[], p_queued bigint[]) returns json
language sql stable
as $$
  with running as (
    select
      t.queue,
      count(*) as tasks,
      count(*) filter (where w.kind = 'dispatcher') as held
    from windlass.tasks t
    left join windlass.workers w on w.id = t.worker_id
    where t.status = 'running' and t.queue = any (p_queues)
    group by t.queue
  ),
  busiest as (
    select q.name, q.queued + coalesce(r.held, 0) as queued
    from unnest(p_queues, p_queued) as q (name, queued)
    left join running r on r.queue = q.name
    where q.queued + coalesce(r.tasks, 0) > 0
    order by q.queued + coalesce(r.tasks, 0) desc, q.name collate "C" limit 32
  ),
  samples as (
    select
      r.queue,
      avg(r.duration_s) as mean_s,
      array_agg(round(r.duration_s::numeric, 3) order by r.duration_s) as durations_s
    from (
      select
        n.queue,
        extract(epoch from n.finished_at - n.started_at)::double precision as duration_s,
        row_number() over (partition by n.queue order by n.finished_at desc) as number
      from (
        select t.queue, t.started_at, t.finished_at from windlass.tasks t
        where t.status = 'complete'
        order by t.finished_at desc limit 5000
      ) as n
      where n.queue in (select b.name from busiest b)
    ) as r
    where r.number <= 100
    group by r.queue
  ),
  remembered as (
    select
      m.name,
      avg(m.duration_s) as mean_s,
      array_agg(round(m.duration_s::numeric, 3) order by m.duration_s) as durations_s
    from (
      select b.name, d.duration_s
      from busiest b
      left join samples s on s.queue = b.name
      cross join lateral (
        select unnest(s.durations_s)::double precision as duration_s
        union all
        select h.duration_s
        from windlass_internal.remembered_durations(
          array[b.name], 100 - cardinality(coalesce(s.durations_s, '{}'))
        ) as h
      ) as d
      where cardinality(coalesce(s.durations_s, '{}')) < 8
    ) as m
    group by m.name
  )
  select coalesce(json_agg(json_build_object(
    'name', b.name,
    'queued', b.queued,
    'durations_s', coalesce(m.durations_s, s.durations_s, '{}'),
    'duration_mean_s', coalesce(m.mean_s, s.mean_s)
  ) order by b.name collate "C"), '[]')
  from busiest b
  left join samples s on s.queue = b.name
  left join remembered m on m.name = b.name
$$;

-- Sorted boot times of the last 50 workers that became ready, among the last 200: starts may have been cancelled. If they
-- are fewer than 8, the least that `adaptive` learns a spread from, with those of the last 200 deleted workers. Indexes
-- workers_managed and machine_history_fleet.
create function windlass_internal.recent_boots(p_fleet text) returns numeric[]
language sql stable
as $$
  with live as (
    select b.boot_s, b.created_at
    from (
      select w.id, w.created_at, round(extract(epoch from w.activated_at - w.created_at), 3) as boot_s
      from windlass.workers w
      where w.fleet = p_fleet and w.slot is not null
      order by w.created_at desc, w.id collate "C" desc limit 200
    ) as b
    where b.boot_s is not null
    order by b.created_at desc, b.id collate "C" desc limit 50
  ),
  remembered as (
    select m.boot_s
    from (
      select h.requested_at, round(h.boot_s::numeric, 3) as boot_s from windlass.machine_history h
      where h.fleet = p_fleet
      order by h.requested_at desc limit 200
    ) as m
    where m.boot_s is not null and (select count(*) from live) < 8
    order by m.requested_at desc limit 42
  )
  select array(
    select b.boot_s
    from (select l.boot_s from live l union all select r.boot_s from remembered r) as b
    order by 1
  )
$$;

-- Queued and running tasks of a fleet's queues. Due tasks count as queued; so do tasks that a dispatcher has claimed
-- and not placed yet. p_newest_task_id: the newest task that the last plan knew; later ones have arrived since.
--
-- A million tasks of a queue are counted (MAX_QUEUED of model/snapshot.py), and every queue once: the cost of a cycle
-- grew with the backlog without a limit, so cycles would stop when it is largest. Below that the count is exact, for
-- people and for policies that divide it by tasks or seconds per worker. A million is 1,000 tasks for each of 1,000
-- workers: every policy spawns up to max_workers long before.
create function windlass_internal.observe_queues(
  p_queues text[], p_now timestamptz, p_fleet text, p_newest_task_id bigint
) returns json
language sql stable
as $$
  select json_build_object(
    'queued', waiting.count + claimed.held,
    'running', claimed.running,
    'oldest_queued_age_s', extract(epoch from p_now - least(oldest.ready_at, claimed.oldest_held)),
    'duration_p50_s', completed.p50_s,
    'durations_s', coalesce(remembered.durations_s, completed.durations_s),
    'duration_mean_s', coalesce(remembered.mean_s, completed.mean_s),
    'arrived', arrivals.count,
    'newest_task_id', arrivals.newest_id,
    'each', case
      when cardinality(p_queues) > 1 then windlass_internal.observe_each_queue(waiting.queues, waiting.counts) else '[]'
    end,
    'boots_s', windlass_internal.recent_boots(p_fleet)
  )
  from (
    select coalesce(sum(c.queued), 0)::bigint as count, array_agg(c.queue) as queues, array_agg(c.queued) as counts
    from windlass_internal.count_queued(p_queues, p_now, 1000000) as c
  ) as waiting
  cross join (
    select
      count(*) filter (where w.kind is distinct from 'dispatcher') as running,
      count(*) filter (where w.kind = 'dispatcher') as held,
      min(coalesce(t.ready_at, t.created_at)) filter (where w.kind = 'dispatcher') as oldest_held
    from windlass.tasks t
    left join windlass.workers w on w.id = t.worker_id
    where t.status = 'running' and t.queue = any (p_queues)
  ) as claimed
  cross join lateral (
    -- The primary key serves both. Bounded: beyond 100,000 tasks in one cycle the exact number means nothing.
    select
      (
        select count(*) from (
          select t.queue from windlass.tasks t
          where t.id > coalesce(p_newest_task_id, 9223372036854775807)
          order by t.id limit 100000
        ) as n
        where n.queue = any (p_queues)
      ) as count,
      (select max(t.id) from windlass.tasks t) as newest_id
  ) as arrivals
  cross join lateral (
    -- The newest 500 of these queues among the newest 20,000 of all: index tasks_complete. The inner limit bounds the
    -- cost of a rarely used queue next to a busy one. The sample has the newest 200.
    select
      percentile_cont(0.5) within group (order by r.duration_s) as p50_s,
      avg(r.duration_s) filter (where r.number <= 200) as mean_s,
      coalesce(
        array_agg(round(r.duration_s::numeric, 3) order by r.duration_s) filter (where r.number <= 200), '{}'
      ) as durations_s
    from (
      select
        extract(epoch from n.finished_at - n.started_at)::double precision as duration_s,
        row_number() over (order by n.finished_at desc) as number
      from (
        select t.queue, t.started_at, t.finished_at from windlass.tasks t
        where t.status = 'complete'
        order by t.finished_at desc limit 20000
      ) as n
      where n.queue = any (p_queues)
      order by n.finished_at desc limit 500
    ) as r
  ) as completed
  cross join lateral (
    -- Only if fewer than 8 are known: a fleet that was quiet for longer than tasks are kept remembers them.
    select avg(m.duration_s) as mean_s, array_agg(round(m.duration_s::numeric, 3) order by m.duration_s) as durations_s
    from (
      select unnest(completed.durations_s)::double precision as duration_s
      union all
      select h.duration_s
      from windlass_internal.remembered_durations(p_queues, 200 - cardinality(completed.durations_s)) as h
    ) as m
    where cardinality(completed.durations_s) < 8
  ) as remembered
  left join lateral (
    -- The oldest of the first 100 of each queue: one index probe per queue. The first alone may have been requeued a
    -- moment ago.
    select min(head.ready_at) as ready_at
    from unnest(p_queues) as q (name)
    cross join lateral (
      select coalesce(t.ready_at, t.created_at) as ready_at from windlass.tasks t
      where t.queue = q.name and t.status = 'queued' and t.run_after is null
      order by t.priority desc, t.id limit 100
    ) as head
  ) as oldest on true
$$;
