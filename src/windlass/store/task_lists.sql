-- Named queries of lists of tasks and of failed attempts. Each reads a bounded number of rows.
-- Searches do not read payloads of the queues in the last parameter; those of failed attempts do not read their errors.
-- The planner needs the literal status to use a partial index, so `tasks_{complete|failed}` is one query per status.

-- name: running_tasks_of
-- running_tasks_of; tasks_running.
select t.id from windlass_internal.tasks t where t.worker_id = $1 and t.status = 'running' order by t.id limit $2;

-- name: tasks_newest
-- tasks_page; the primary key backwards, after the cursor $5, at most $4 rows.
select s.id
from (select t.* from windlass_internal.tasks t where $5::bigint is null or t.id < $5 order by t.id desc limit $4) as s
where ($1::text is null or s.queue = $1)
  and ($2::text is null or windlass_internal.matches_search(
    s.id, s.unique_key, s.error_code, s.error,
    case when s.queue <> all ($6::text[]) then s.payload end, s.attempts, s.ready_at, $2
  ))
order by s.id desc limit $3;

-- name: tasks_newest_end
-- The last row that a search of tasks_newest examined.
select t.id from windlass_internal.tasks t where $2::bigint is null or t.id < $2 order by t.id desc limit 1 offset $1 - 1;

-- name: tasks_running
-- tasks_page; tasks_running, sorted. Materialized, or the planner would scan the primary key over all queued tasks.
with running as materialized (
  select t.id, t.queue, t.unique_key, t.error_code, t.error, t.payload, t.attempts, t.ready_at
  from windlass_internal.tasks t where t.status = 'running'
)
select a.id from running a
where ($1::text is null or a.queue = $1)
  and ($2::text is null or windlass_internal.matches_search(
    a.id, a.unique_key, a.error_code, a.error,
    case when a.queue <> all ($5::text[]) then a.payload end, a.attempts, a.ready_at, $2
  ))
  and ($3::bigint is null or a.id < $3)
order by a.id desc limit $4;

-- name: tasks_{complete|failed}
-- tasks_page; tasks_complete or tasks_failed backwards, after the cursor ($5, $6), at most $4 rows. $7: of the failed
-- tasks, only the cancelled ones, or only the others.
select s.id, s.finished_at as at
from (
  select t.* from windlass_internal.tasks t
  where t.status = '{variant}'
    and ($5::timestamptz is null or (t.finished_at <= $5 and (t.finished_at < $5 or t.id < $6::bigint)))
  order by t.finished_at desc, t.id desc limit $4
) as s
where ($1::text is null or s.queue = $1)
  and ($7::boolean is null or (s.error_code is not distinct from 'CANCELLED') = $7)
  and ($2::text is null or windlass_internal.matches_search(
    s.id, s.unique_key, s.error_code, s.error,
    case when s.queue <> all ($8::text[]) then s.payload end, s.attempts, s.ready_at, $2
  ))
order by s.finished_at desc, s.id desc limit $3;

-- name: tasks_{complete|failed}_end
-- The last row that a search of the list examined.
select t.id, t.finished_at as at from windlass_internal.tasks t
where t.status = '{variant}'
  and ($2::timestamptz is null or (t.finished_at <= $2 and (t.finished_at < $2 or t.id < $3::bigint)))
order by t.finished_at desc, t.id desc limit 1 offset $1 - 1;

-- name: tasks_queued
-- tasks_page; tasks_ready of each queue ($1), after the cursor ($5, $6), at most $4 rows of each.
select m.id, m.priority
from unnest($1::text[]) as q (name)
cross join lateral (
  select s.id, s.priority
  from (
    select t.* from windlass_internal.tasks t
    where t.queue = q.name and t.status = 'queued' and t.run_after is null
      and ($5::integer is null or (t.priority <= $5 and (t.priority < $5 or t.id > $6::bigint)))
    order by t.priority desc, t.id limit $4
  ) as s
  where $2::text is null or windlass_internal.matches_search(
    s.id, s.unique_key, s.error_code, s.error,
    case when s.queue <> all ($7::text[]) then s.payload end, s.attempts, s.ready_at, $2
  )
  limit $3
) as m
order by m.priority desc, m.id limit $3;

-- name: tasks_queued_end
-- The earliest of the queues' ($1) $2-th rows: a search has examined everything before it.
select e.id, e.priority
from unnest($1::text[]) as q (name)
cross join lateral (
  select t.id, t.priority from windlass_internal.tasks t
  where t.queue = q.name and t.status = 'queued' and t.run_after is null
    and ($3::integer is null or (t.priority <= $3 and (t.priority < $3 or t.id > $4::bigint)))
  order by t.priority desc, t.id limit 1 offset $2::bigint - 1
) as e
order by e.priority desc, e.id limit 1;

-- name: tasks_scheduled
-- tasks_page; tasks_scheduled of each queue ($1), after the cursor ($5, $6), at most $4 rows of each.
select m.id, m.run_after as at
from unnest($1::text[]) as q (name)
cross join lateral (
  select s.id, s.run_after
  from (
    select t.* from windlass_internal.tasks t
    where t.queue = q.name and t.status = $7 and t.run_after is not null
      and ($5::timestamptz is null or (t.run_after >= $5 and (t.run_after > $5 or t.id > $6::bigint)))
    order by t.run_after, t.id limit $4
  ) as s
  where $2::text is null or windlass_internal.matches_search(
    s.id, s.unique_key, s.error_code, s.error,
    case when s.queue <> all ($8::text[]) then s.payload end, s.attempts, s.ready_at, $2
  )
  limit $3
) as m
order by m.run_after, m.id limit $3;

-- name: tasks_scheduled_end
-- As tasks_queued_end.
select e.id, e.run_after as at
from unnest($1::text[]) as q (name)
cross join lateral (
  select t.id, t.run_after from windlass_internal.tasks t
  where t.queue = q.name and t.status = $5 and t.run_after is not null
    and ($3::timestamptz is null or (t.run_after >= $3 and (t.run_after > $3 or t.id > $4::bigint)))
  order by t.run_after, t.id limit 1 offset $2::bigint - 1
) as e
order by e.run_after, e.id limit 1;

-- name: tasks_by_id_or_key
-- tasks_page: exact matches of a search; primary key, tasks_unique_key of each queue ($2), tasks_adopted.
select t.id, t.queue, t.status, t.run_after, t.error_code from windlass_internal.tasks t where t.id = $3::bigint
union
select t.id, t.queue, t.status, t.run_after, t.error_code
from unnest($2::text[]) as q (name)
join windlass_internal.tasks t on t.queue = q.name and t.unique_key = $1 and t.adoption is null
union
select t.id, t.queue, t.status, t.run_after, t.error_code
from windlass_internal.adoptions a
join windlass_internal.tasks t on t.adoption = a.name and t.unique_key = $1 and t.queue = any ($2::text[])
limit 100;

-- name: task_rows
-- tasks_page, running_tasks_of; primary keys, charges_task. Large payloads are not unpacked for the first $2 characters.
select
  t.id, t.queue, t.status, t.priority, t.attempts, t.max_attempts, t.timeout_s, t.run_after, t.created_at, t.started_at,
  t.finished_at, t.worker_id, t.unique_key, t.progress, t.progress_note, t.error_code, t.error, t.owner,
  case when pg_column_size(t.payload) <= 65536 then left(t.payload::text, $2) end as payload_preview,
  greatest(t.created_at, t.ready_at, t.run_after) as ready_at, c.cost_micros, c.currency
from unnest($1::bigint[]) with ordinality as wanted (id, place)
join windlass_internal.tasks t on t.id = wanted.id
left join lateral (
  select sum(k.amount_micros)::bigint as cost_micros, k.currency
  from windlass_internal.charges k where k.task_id = t.id group by k.currency order by 1 desc limit 1
) as c on true
order by wanted.place;

-- name: task_with_payload
-- The page of one task; primary key.
select
  id, queue, status, priority, attempts, max_attempts, timeout_s, run_after, created_at, started_at, finished_at,
  worker_id, unique_key, progress, progress_note, error_code, error, owner, payload, result,
  greatest(created_at, ready_at, run_after) as ready_at
from windlass_internal.tasks where id = $1;

-- name: task_errors
-- task_errors; events_errors backwards over the last $1 seconds, after the cursor ($7, $8), at most $6 rows.
select
  f.id, f.at, f.task_id, f.worker_id, (f.detail ->> 'attempt')::integer as attempt,
  f.detail ->> 'error_code' as error_code, f.detail ->> 'error' as error, t.queue, t.status, w.fleet, w.instance_type,
  w.host, case when pg_column_size(t.payload) <= 65536 then left(t.payload::text, $9) end as payload_preview
from (
  select e.* from windlass_internal.events e
  where e.code in ('TASK_ERROR', 'TASK_FAILED', 'TASK_REQUEUED')
    and e.at > windlass.now() - make_interval(secs => $1::float8)
    and ($7::timestamptz is null or (e.at <= $7 and (e.at < $7 or e.id < $8::bigint)))
  order by e.at desc, e.id desc limit $6
) as f
left join windlass_internal.tasks t on t.id = f.task_id
left join windlass_internal.workers w on w.id = f.worker_id
where ($2::text is null or t.queue = $2) and ($3::text is null or f.worker_id = $3)
  and (
    $4::text is null or windlass_internal.matches_error(
      f.detail ->> 'error_code', case when t.queue <> all ($10::text[]) then f.detail ->> 'error' end, $4
    )
  )
order by f.at desc, f.id desc limit $5;

-- name: task_errors_end
-- The last row that task_errors examined.
select e.at, e.id from windlass_internal.events e
where e.code in ('TASK_ERROR', 'TASK_FAILED', 'TASK_REQUEUED')
  and e.at > windlass.now() - make_interval(secs => $1::float8)
  and ($3::timestamptz is null or (e.at <= $3 and (e.at < $3 or e.id < $4::bigint)))
order by e.at desc, e.id desc limit 1 offset $2 - 1;

-- name: task_error_counts
-- task_error_counts; the newest $5 rows of events_errors in the last $1 seconds, counted by worker and by error code.
select
  grouping(f.worker_id, f.detail ->> 'error_code') as level, f.worker_id, f.detail ->> 'error_code' as error_code,
  count(*) as errors, count(distinct f.task_id) as tasks
from (
  select e.worker_id, e.detail, e.task_id from windlass_internal.events e
  where e.code in ('TASK_ERROR', 'TASK_FAILED', 'TASK_REQUEUED')
    and e.at > windlass.now() - make_interval(secs => $1::float8)
  order by e.at desc, e.id desc limit $5
) as f
left join windlass_internal.tasks t on t.id = f.task_id
where ($2::text is null or t.queue = $2) and ($3::text is null or f.worker_id = $3)
  and (
    $4::text is null or windlass_internal.matches_error(
      f.detail ->> 'error_code', case when t.queue <> all ($6::text[]) then f.detail ->> 'error' end, $4
    )
  )
group by grouping sets ((f.worker_id), (f.detail ->> 'error_code'), ())
order by errors desc limit 1000;
