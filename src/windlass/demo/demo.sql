-- Named queries of `windlass demo`, for the database that it creates.

-- name: create_history
-- A trigger records every update of a task's status, independently of Windlass. An update to the same status adds a row
-- too, so that a second accepted completion is detected.
create schema demo;

create table demo.history (
  task_id bigint not null,
  status text not null,
  worker_id text,
  at timestamptz not null default clock_timestamp()
);

create function demo.record_status() returns trigger
language plpgsql
as $$
begin
  insert into demo.history (task_id, status, worker_id) values (new.id, new.status, new.worker_id);
  return null;
end
$$;

create trigger record_status
  after insert or update of status on windlass.tasks
  for each row execute function demo.record_status();

-- name: new_entries
-- Events after id $2, then decisions of cycles after id $1.
select *
from (
  select
    'cycle' as source, id, started_at as at, 'DECISION' as code, decision as reason, null as worker_id,
    null as task_id
  from windlass.cycles where id > $1
  union all
  select 'event', id, at, code, reason, worker_id, task_id from windlass.events
  where id > $2
) as entries
order by source desc, id;

-- name: progress
-- Counts of tasks, cycles and workers while the demo runs.
select
  (select count(*) from windlass.tasks where status = 'complete') as complete,
  (select count(*) from windlass.tasks where status not in ('complete', 'failed')) as unfinished,
  (select count(*) from windlass.tasks) as enqueued,
  (select count(*) from windlass.cycles) as cycles,
  (select count(*) from windlass.workers where status = 'active' and slot is not null) as ready,
  (select count(*) from windlass.workers where status = 'active' and kind = 'dispatcher') as dispatchers,
  (select count(*) from windlass.workers where status <> 'terminated' and slot is not null) as workers;

-- name: worker_to_kill
-- The oldest worker with a running task that is neither poisonous nor stuck.
select w.id, w.pid, w.machine_id, min(t.id) as task_id from windlass.workers w
join windlass.tasks t on t.worker_id = w.id and t.status = 'running'
where w.status = 'active' and w.kind <> 'dispatcher' and not (t.payload ->> 'is_poisonous')::boolean
  and not coalesce((t.payload ->> 'is_stuck')::boolean, false)
group by w.id, w.pid, w.machine_id order by w.created_at limit 1;

-- name: worker_to_drain
-- The worker whose task started last, except worker $1 and stuck tasks.
select w.id from windlass.workers w
join windlass.tasks t on t.worker_id = w.id and t.status = 'running'
where w.status = 'active' and w.id is distinct from $1 and not (t.payload ->> 'is_stuck')::boolean
order by t.started_at desc limit 1;

-- name: final_counts
-- Totals at the end of the demo, from demo.history and the tables.
with per_task as (
  select
    task_id,
    count(*) filter (where status = 'running') as attempts,
    count(*) filter (where status = 'complete') as accepted,
    extract(epoch from min(at) filter (where status = 'running') - min(at) filter (where status = 'queued')) as wait_s
  from demo.history
  group by task_id
)
select
  (select count(*) from windlass.tasks) as enqueued,
  (select count(*) from windlass.tasks where status = 'complete') as complete,
  (select array(select id from windlass.tasks where status = 'failed' order by id)) as failed_tasks,
  (select count(*) from per_task where accepted = 1) as accepted_once,
  (select count(*) from per_task where accepted > 1) as accepted_twice,
  (select coalesce(sum(attempts), 0)::bigint from per_task) as attempts,
  (
    select count(*) from windlass.events where code in ('TASK_REQUEUED', 'TASK_FAILED', 'TASK_ERROR', 'TASK_RELEASED')
  ) as lost_attempts,
  (select percentile_cont(0.5) within group (order by wait_s) from per_task)::float8 as wait_p50_s,
  (select percentile_cont(0.95) within group (order by wait_s) from per_task)::float8 as wait_p95_s,
  (select count(*) from windlass.workers where slot is not null) as workers_spawned,
  (select count(*) from windlass.workers where status <> 'terminated' and slot is not null) as workers_left;

-- name: count_used_nodes
-- Number of nodes that completed a task.
select count(distinct worker_id) from windlass.tasks where status = 'complete';

-- name: poison_task
-- The poisonous task and the workers that it killed, in order.
select
  t.id as poisonous_task_id,
  array(
    select e.worker_id from windlass.events e
    where e.task_id = t.id and e.code in ('TASK_REQUEUED', 'TASK_FAILED')
    order by e.id
  ) as poisoned_worker_ids
from windlass.tasks t where (t.payload ->> 'is_poisonous')::boolean;

-- name: running_task
-- The first running task of worker $1.
select min(t.id) from windlass.tasks t
where t.worker_id = $1 and t.status = 'running';

-- name: machine_workers
-- The worker of each machine and its end code.
select w.id as worker_id, w.machine_id, w.code from windlass.workers w
where w.machine_id is not null
order by w.created_at, w.slot;

-- name: recovery_of_killed_worker
-- Outcome for worker $1, killed at $3, and its running task $2.
select
  $1::text as killed_worker_id,
  $2::bigint as killed_task_id,
  (select w.code from windlass.workers w where w.id = $1 and w.status = 'terminated') as worker_ended_as,
  (
    select extract(epoch from min(e.at) - $3::timestamptz)::float8
    from windlass.events e
    where e.code in ('TASK_REQUEUED', 'TASK_ERROR') and e.task_id = $2 and e.worker_id = $1
  ) as noticed_after_s,
  (select t.worker_id from windlass.tasks t where t.id = $2 and t.status = 'complete') as completed_by;

-- name: first_stuck_task
-- The first worker that failed because of a stuck task, the task, and the start of the attempt.
select e.worker_id, t.task_id, h.at from windlass.events e
join windlass.events t on t.worker_id = e.worker_id and t.code = 'TASK_REQUEUED'
join demo.history h on h.task_id = t.task_id and h.worker_id = e.worker_id and h.status = 'running'
where e.code = 'WORKER_ERROR' and e.detail ->> 'code' = 'STUCK_TASK'
order by e.id, h.at limit 1;

-- name: worker_error_codes
-- Error codes of failed workers.
select coalesce(array_agg(detail ->> 'code'), '{}') from windlass.events where code = 'WORKER_ERROR';

-- name: count_prepared_machines
-- Number of worker programs started over SSH.
select count(*) from windlass.events where code = 'MACHINE_PREPARED';

-- name: completing_worker
select worker_id from windlass.tasks where id = $1 and status = 'complete';
