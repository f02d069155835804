-- Named queries about tasks, workers, events and privileges. Each says who calls it and which index serves it.
-- Queries over several statuses have one part per status: the planner needs the literal status to use a partial index.

-- name: inserted_by_this_transaction
-- `windlass enqueue --unique-key`; primary key. Whether this transaction inserted the row, by its transaction id.
select xmin::text::bigint = txid_current() % (2 ^ 32)::bigint from windlass.tasks
where id = $1;

-- name: insert_from_staging
-- enqueue_many with unique keys: COPY cannot skip conflicts, so the rows go through a temporary table.
insert into windlass.tasks (queue, payload, priority, run_after, max_attempts, timeout_s, unique_key)
select queue, payload, priority, run_after, max_attempts, timeout_s, unique_key
from windlass_staging
order by position
on conflict (queue, unique_key) where unique_key is not null do nothing;

-- name: task
-- `windlass tasks show`; primary key.
select
  id, queue, status, priority, attempts, max_attempts, timeout_s, run_after, created_at, started_at, finished_at,
  worker_id, unique_key, progress, progress_note, error_code, error, owner, payload, result
from windlass.tasks where id = $1;

-- name: tasks
-- Tasks with payload and result; scans the primary key backwards up to the limit.
select
  id, queue, status, priority, attempts, max_attempts, timeout_s, run_after, created_at, started_at, finished_at,
  worker_id, unique_key, progress, progress_note, error_code, error, owner, payload, result
from windlass.tasks
where ($1::text is null or queue = $1)
  and ($2::text is null or status = $2)
  and ($3::bigint is null or id < $3)
order by id desc limit $4;

-- name: task_summaries
-- `windlass tasks list`; scans the primary key backwards up to the limit. Payloads and results are not read.
-- $5: only tasks whose run_after is in the future.
select
  id, queue, status, priority, attempts, max_attempts, timeout_s, run_after, created_at, started_at, finished_at,
  worker_id, unique_key, progress, progress_note, error_code, error, owner
from windlass.tasks
where ($1::text is null or queue = $1)
  and ($2::text is null or status = $2)
  and ($3::bigint is null or id < $3)
  and (not $5::boolean or run_after > windlass.now())
order by id desc limit $4;

-- name: known_queues
-- Queue names to compare a mistyped name with. Skips from queue to queue in tasks_ready and tasks_scheduled, and reads
-- tasks_running and the newest tasks: the cost grows with the number of queues, not of tasks. Producers choose the
-- names, so it skips at most 1,000 times.
with recursive ready (queue, jumps) as (
  (
    select t.queue::text, 1 from windlass.tasks t
    where t.status = 'queued' and t.run_after is null
    order by t.queue limit 1
  )
  union all
  select (
    select t.queue::text from windlass.tasks t
    where t.status = 'queued' and t.run_after is null and t.queue > r.queue
    order by t.queue limit 1
  ), r.jumps + 1
  from ready r
  where r.queue is not null and r.jumps < 1000
),
waiting (queue, jumps) as (
  (
    select t.queue::text, 1 from windlass.tasks t
    where t.run_after is not null
    order by t.queue limit 1
  )
  union all
  select (
    select t.queue::text from windlass.tasks t
    where t.run_after is not null and t.queue > w.queue
    order by t.queue limit 1
  ), w.jumps + 1
  from waiting w
  where w.queue is not null and w.jumps < 1000
)
select queue
from (
  select queue from ready
  union
  select queue from waiting
  union
  select queue::text from windlass.tasks where status = 'running'
  union
  select unnest(queues) from windlass.workers where status <> 'terminated'
  union
  (select n.queue from (select queue::text from windlass.tasks order by id desc limit 1000) as n)
) as known
where queue is not null
order by queue collate "C";

-- name: has_recent_task
-- Whether one of the newest $2 tasks is of this queue; scans the primary key backwards.
select exists (
  select
  from (select queue from windlass.tasks order by id desc limit $2) as recent
  where recent.queue = $1::text
);

-- name: is_queue_served
-- `windlass enqueue`: whether a fleet or a live worker serves this queue; workers_live.
select
  exists (select from windlass.fleets where $1::text = any (queues))
  or exists (select from windlass.workers where status <> 'terminated' and $1::text = any (queues));

-- name: workers
-- `windlass status` and worker(); workers_live or primary key.
select
  id, fleet, slot, status, paused, queues, concurrency, lease_s, created_at, activated_at, last_heartbeat,
  first_claimed_at, terminated_at, code, reason, host, pid, version, vram_total_mb, vram_used_mb, late_results,
  metadata, kind, node, machine_id, instance_type, place, address, machine_host, running_at, reachable_at, joined_at,
  boot_step, price_micros_per_hour, currency, billing_unit_s, price_parts, billed_since, billed_until, settled_until
from windlass.workers
where ($1::text is null or id = $1)
  and ($2 or status <> 'terminated')
order by created_at, id;

-- name: set_paused
-- pause and resume; primary key.
with changed as (
  update windlass.workers set paused = $2
  where id = any ($1::text[]) and status in ('spawning', 'active', 'terminating') and paused <> $2
  returning id, fleet
)
insert into windlass.events (code, reason, fleet, worker_id)
select case when $2 then 'WORKER_PAUSED' else 'WORKER_RESUMED' end, 'by hand', fleet, id
from changed;

-- name: set_terminating
-- Drain workers by hand; primary key.
with changed as (
  update windlass.workers
  set status = 'terminating', terminating_at = windlass.now(), code = 'MANUAL', reason = $2
  where id = any ($1::text[]) and status in ('spawning', 'active')
  returning id, fleet
)
insert into windlass.events (code, reason, fleet, worker_id)
select 'WORKER_TERMINATING', $2, fleet, id
from changed;

-- name: queue_depths
-- `windlass status`; tasks_ready, tasks_scheduled, tasks_running.
select queue, queued, scheduled, retrying, running, oldest_queued_age_s::float8
from windlass.queue_depth
order by queue;

-- name: finished_since
-- `windlass status`; tasks_complete, tasks_failed.
select 'complete' as status, count(*) as count from windlass.tasks
where status = 'complete' and finished_at > windlass.now() - make_interval(secs => $1::float8)
union all
select 'failed', count(*) from windlass.tasks
where status = 'failed' and finished_at > windlass.now() - make_interval(secs => $1::float8);

-- name: events
-- Events of a task or a worker; events_task, events_worker.
select id, at, code, reason, fleet, worker_id, task_id, detail, actor from windlass.events
where ($1::bigint is null or task_id = $1)
  and ($2::text is null or worker_id = $2)
order by id desc limit $3;

-- name: purge
-- `windlass tasks purge`, in bounded rounds, each starting where the previous one ended; tasks_complete, tasks_failed.
with deleted as (
  delete from windlass.tasks
  where id = any (
    array(
      select id from windlass.tasks
      where status = 'complete' and 'complete' = any ($2::text[])
        and finished_at between coalesce($4::timestamptz, '-infinity') and $3::timestamptz
        and ($1::text is null or queue = $1)
      order by finished_at limit $6 for update skip locked
    ) || array(
      select id from windlass.tasks
      where status = 'failed' and 'failed' = any ($2::text[])
        and finished_at between coalesce($5::timestamptz, '-infinity') and $3::timestamptz
        and ($1::text is null or queue = $1)
      order by finished_at limit $6 for update skip locked
    )
  )
  returning status, finished_at
)
select count(*) as count, max(finished_at) filter (where status = 'complete') as complete_to,
  max(finished_at) filter (where status = 'failed') as failed_to
from deleted;

-- name: server_facts
-- `windlass doctor`; reads no table.
select
  current_database() as database,
  current_user as "user",
  current_setting('server_version') as server_version,
  current_setting('server_version_num')::integer as server_version_number,
  pg_backend_pid() as backend_pid,
  has_database_privilege(current_database(), 'create') as may_create_schema,
  clock_timestamp() as now;

-- name: has_managed_workers
-- `windlass up` without a fleet; workers_one_live_per_slot.
select exists (
  select from windlass.workers where slot is not null and status in ('spawning', 'active', 'terminating', 'error')
);

-- name: missing_control_privileges
-- `windlass up`: privileges that the control plane needs and this user lacks: everything except changing the schema.
select 'usage on schema ' || name as missing
from unnest(array['windlass', 'windlass_internal']) as name
where not has_schema_privilege(name, 'usage')
union all
(
  select needed || ' on ' || class.relname
  from pg_class as class
  cross join unnest(array['select', 'insert', 'update', 'delete']) as needed
  where class.relnamespace = 'windlass'::regnamespace and class.relkind = 'r'
    and class.relname <> 'migrations' and not has_table_privilege(class.oid, needed)
  order by class.relname, needed
)
union all
(
  select 'execute on ' || function.proname
  from pg_proc as function
  where function.pronamespace in ('windlass'::regnamespace, 'windlass_internal'::regnamespace)
    and not has_function_privilege(function.oid, 'execute')
  order by function.proname
);

-- name: missing_privileges
-- `windlass doctor`: privileges that producers and workers need and this user lacks. Empty without a schema. A user
-- with a role of grants.sql is not asked for more than that role has.
with schema as (
  select oid, nspname as name
  from pg_namespace
  where nspname in ('windlass', 'windlass_internal')
),
everything as (
  select oid
  from schema
  where not exists (
    select from pg_roles r where r.rolname in ('windlass_producer', 'windlass_worker') and pg_has_role(r.oid, 'usage')
  )
),
lacking as (
  -- Without usage on a schema no other privilege helps, so it comes first.
  select 1 as place, 'usage on schema ' || name as missing
  from schema
  where not has_schema_privilege(oid, 'usage')
  union all
  select 2, needed || ' on ' || class.relname
  from everything
  join pg_class class on class.relnamespace = everything.oid and class.relkind = 'r'
  cross join unnest(array['select', 'insert', 'update', 'delete']) as needed
  where not has_table_privilege(class.oid, needed)
    -- Only `windlass db migrate` writes there.
    and (class.relname <> 'migrations' or needed = 'select')
  union all
  select 3, 'execute on ' || function.proname
  from everything
  join pg_proc function on function.pronamespace = everything.oid
  where not has_function_privilege(function.oid, 'execute')
)
select missing
from lacking
order by place, missing;
