-- Named queries about tasks, workers, events and privileges. Each says who calls it and which index serves it.
-- Queries over several statuses have one part per status: the planner needs the literal status to use a partial index.

-- name: insert_from_staging
-- enqueue_many with unique keys: COPY cannot skip conflicts, so the rows go through a temporary table.
insert into windlass.tasks (queue, payload, priority, run_after, max_attempts, timeout_s, unique_key)
select queue, payload, priority, run_after, max_attempts, timeout_s, unique_key
from windlass_staging
order by position
on conflict (queue, unique_key) where unique_key is not null and adoption is null do nothing;

-- name: may_insert_tasks
-- enqueue_many; reads no table.
select has_table_privilege('windlass.tasks', 'insert');

-- name: enqueue_many
-- enqueue_many of users who may not write the table. NewTask's fields in order; payloads travel as text.
select windlass.enqueue_many(
  $1::text[], $2::text[]::jsonb[], $3::integer[], $4::timestamptz[], $5::integer[], $6::float8[], $7::text[], $8
);

-- name: task
-- `windlass tasks show`; primary key.
select
  id, queue, status, priority, attempts, max_attempts, timeout_s, run_after, created_at, started_at, finished_at,
  worker_id, unique_key, progress, progress_note, error_code, error, owner, payload, result
from windlass.task_details where id = $1;

-- name: tasks
-- Tasks with payload and result; scans the primary key backwards. For tests and measurements: a filter that few tasks
-- match reads the whole table.
select
  id, queue, status, priority, attempts, max_attempts, timeout_s, run_after, created_at, started_at, finished_at,
  worker_id, unique_key, progress, progress_note, error_code, error, owner, payload, result
from windlass.task_details
where ($1::text is null or queue = $1)
  and ($2::text is null or status = $2)
  and ($3::bigint is null or id < $3)
order by id desc limit $4;

-- name: task_summaries
-- task_summaries, of all or of finished tasks; the primary key backwards, before the id $3, at most $5 rows. Large
-- payloads are not unpacked for the first $6 characters; results are not read. $7: of the failed tasks, only the
-- cancelled ones, or only the others.
select
  s.id, s.queue, s.status, s.priority, s.attempts, s.max_attempts, s.timeout_s, s.run_after, s.created_at, s.started_at,
  s.finished_at, s.worker_id, s.unique_key, s.progress, s.progress_note, s.error_code, s.error, s.owner,
  case when pg_column_size(s.payload) <= 65536 then left(s.payload::text, $6) end as payload_preview
from (
  select t.* from windlass.task_details t where $3::bigint is null or t.id < $3 order by t.id desc limit $5
) as s
where ($1::text is null or s.queue = $1)
  and ($2::text is null or s.status = $2)
  and ($7::boolean is null or s.status <> 'failed' or (s.error_code is not distinct from 'CANCELLED') = $7)
order by s.id desc limit $4;

-- name: task_summaries_end
-- The last row that a search of task_summaries examined.
select t.id from windlass.task_details t where $1::bigint is null or t.id < $1 order by t.id desc limit 1 offset $2 - 1;

-- name: unfinished_summaries
-- task_summaries of a status of unfinished tasks; tasks_ready, tasks_scheduled, tasks_running. Materialized, or the
-- planner would scan the primary key over all finished tasks. $5: only tasks whose run_after is in the future.
with unfinished as materialized (
  select t.id from windlass.task_details t
  where t.status = 'queued' and t.run_after is null and $2 = 'queued' and not $5::boolean
    and ($1::text is null or t.queue = $1) and ($3::bigint is null or t.id < $3)
  union all
  select t.id from windlass.task_details t
  where t.run_after is not null and t.status = $2 and (not $5::boolean or t.run_after > windlass.now())
    and ($1::text is null or t.queue = $1) and ($3::bigint is null or t.id < $3)
  union all
  select t.id from windlass.task_details t
  where t.status = 'running' and $2 = 'running'
    and ($1::text is null or t.queue = $1) and ($3::bigint is null or t.id < $3)
),
newest as (
  select u.id from unfinished u order by u.id desc limit $4
)
select
  t.id, t.queue, t.status, t.priority, t.attempts, t.max_attempts, t.timeout_s, t.run_after, t.created_at, t.started_at,
  t.finished_at, t.worker_id, t.unique_key, t.progress, t.progress_note, t.error_code, t.error, t.owner,
  case when pg_column_size(t.payload) <= 65536 then left(t.payload::text, $6) end as payload_preview
from newest n
join windlass.task_details t on t.id = n.id
order by t.id desc;

-- name: known_queues
-- Queue names to compare a mistyped name with. Skips from queue to queue in tasks_ready and tasks_scheduled, and reads
-- tasks_running and the newest tasks: the cost grows with the number of queues, not of tasks. Producers choose the
-- names, so it skips at most 1,000 times.
with recursive ready (queue, jumps) as (
  (
    select t.queue::text, 1 from windlass_internal.tasks t
    where t.status = 'queued' and t.run_after is null
    order by t.queue limit 1
  )
  union all
  select (
    select t.queue::text from windlass_internal.tasks t
    where t.status = 'queued' and t.run_after is null and t.queue > r.queue
    order by t.queue limit 1
  ), r.jumps + 1
  from ready r
  where r.queue is not null and r.jumps < 1000
),
waiting (queue, jumps) as (
  (
    select t.queue::text, 1 from windlass_internal.tasks t
    where t.run_after is not null
    order by t.queue limit 1
  )
  union all
  select (
    select t.queue::text from windlass_internal.tasks t
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
  select queue::text from windlass_internal.tasks where status = 'running'
  union
  select unnest(queues) from windlass_internal.workers where status <> 'terminated'
  union
  (select n.queue from (select queue::text from windlass_internal.tasks order by id desc limit 1000) as n)
) as known
where queue is not null
order by queue collate "C";

-- name: has_recent_task
-- Whether one of the newest $2 tasks is of this queue; scans the primary key backwards.
select exists (
  select
  from (select queue from windlass.task_details order by id desc limit $2) as recent
  where recent.queue = $1::text
);

-- name: is_queue_served
-- `windlass enqueue`: whether a fleet or a live worker serves this queue; workers_live.
select
  exists (select from windlass_internal.fleets where $1::text = any (queues))
  or exists (select from windlass_internal.workers where status <> 'terminated' and $1::text = any (queues));

-- name: workers
-- `windlass status` and worker(); workers_live or primary key.
select
  id, fleet, slot, status, paused, queues, concurrency, lease_s, created_at, activated_at, last_heartbeat,
  first_claimed_at, terminated_at, code, reason, host, pid, version, vram_total_mb, vram_used_mb, late_results,
  fingerprint, metadata, kind, node, machine_id, instance_type, place, address, machine_host, running_at, reachable_at, joined_at,
  boot_step, price_micros_per_hour, currency, billing_unit_s, price_parts, billed_since, billed_until, settled_until
from windlass_internal.workers
where ($1::text is null or id = $1)
  and ($2 or status <> 'terminated')
order by created_at, id;

-- name: queue_depths
-- `windlass status`; tasks_ready, tasks_scheduled, tasks_running.
select queue, queued, scheduled, retrying, running, oldest_queued_age_s::float8
from windlass.queue_depth
order by queue;

-- name: finished_since
-- `windlass status`; tasks_complete, tasks_failed. Cancelled tasks are no failures.
select 'complete' as status, count(*) as count from windlass_internal.tasks
where status = 'complete' and finished_at > windlass.now() - make_interval(secs => $1::float8)
union all
select 'failed', count(*) from windlass_internal.tasks
where status = 'failed' and finished_at > windlass.now() - make_interval(secs => $1::float8)
  and error_code is distinct from 'CANCELLED';

-- name: events
-- Events of a task or a worker; events_task, events_worker.
select e.id, e.at, e.code, e.reason, e.fleet, e.worker_id, e.task_id, e.detail, e.actor,
  (select t.queue from windlass_internal.tasks t where t.id = e.task_id) as queue
from windlass_internal.events e
where ($1::bigint is null or e.task_id = $1)
  and ($2::text is null or e.worker_id = $2)
order by e.id desc limit $3;

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
  select from windlass_internal.workers where slot is not null and status in ('spawning', 'active', 'terminating', 'error')
);

-- name: role_to_set
-- `windlass up`, `windlass worker`: whether this user may act as role $1, and the role has rights in this database. Not
-- if this user has the role's rights alone.
select exists (
  select from pg_roles r
  where r.rolname = $1 and r.rolname <> current_user and pg_has_role(r.oid, 'member')
    -- By oid: a database without the schema has no right in it, and reports that elsewhere.
    and exists (select from pg_namespace n where n.nspname = 'windlass' and has_schema_privilege(r.oid, n.oid, 'usage'))
);

-- name: owner_rights
-- `windlass up`: this user, if it is a superuser or may act as the owner of the schema. By oid, as above.
select current_user from pg_namespace n where n.nspname = 'windlass' and pg_has_role(n.nspowner, 'usage');

-- name: missing_control_privileges
-- `windlass up`: privileges that the control plane needs and this user lacks: the rights of windlass_orchestrator.
select 'usage on schema ' || name as missing
from unnest(array['windlass', 'windlass_internal']) as name
where not has_schema_privilege(name, 'usage')
union all
select 'the role windlass_orchestrator'
where has_schema_privilege('windlass', 'usage') and has_schema_privilege('windlass_internal', 'usage')
  and not (
    select bool_and(has_function_privilege(f.oid, 'execute'))
    from pg_proc f where f.pronamespace = 'windlass_internal'::regnamespace and f.proname = 'commit_plan'
  );

-- name: missing_privileges
-- `windlass doctor`: what this user lacks to enqueue, to work or to look. Empty without a schema.
select 'usage on schema windlass' as missing
from pg_namespace n
where n.nspname = 'windlass' and not has_schema_privilege(n.oid, 'usage');
