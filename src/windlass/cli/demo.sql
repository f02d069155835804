-- What `windlass demo` asks of its own database.

-- name: install
-- A witness that knows nothing of the rest: every change of a task's status leaves a row, whoever makes it. An update
-- that names the status counts even if it stays the same, so a second accepted completion could not hide.
create schema demo;

create table demo.history (
  task_id bigint not null,
  status text not null,
  worker_id text,
  at timestamptz not null default clock_timestamp()
);

create function demo.remember() returns trigger
language plpgsql
as $$
begin
  insert into demo.history (task_id, status, worker_id) values (new.id, new.status, new.worker_id);
  return null;
end
$$;

create trigger remember
  after insert or update of status on windlass.tasks
  for each row execute function demo.remember();

-- name: standing
-- While it runs, several times a second: how many tasks have which status.
select status, count(*) as count
from windlass.tasks
group by status;

-- name: crew
-- While it runs: who is at what. The one that was killed stays in the list.
select
  w.id,
  w.pid,
  w.status,
  (select count(*) from windlass.tasks t where t.worker_id = w.id and t.status = 'complete') as complete,
  (select min(t.id) from windlass.tasks t where t.worker_id = w.id and t.status = 'running') as task_id,
  extract(epoch from windlass.now() - w.last_heartbeat)::double precision as silent_s
from windlass.workers w
order by w.created_at, w.id;

-- name: report
-- At the end, from the witness and the tasks themselves.
with per_task as (
  select
    task_id,
    count(*) filter (where status = 'running') as attempts,
    count(*) filter (where status = 'complete') as accepted,
    min(at) filter (where status = 'running') - min(at) filter (where status = 'queued') as wait
  from demo.history
  group by task_id
)
select
  (select count(*) from windlass.tasks where status = 'complete') as complete,
  (select count(*) from per_task where accepted = 1) as accepted_once,
  (select count(*) from per_task where accepted > 1) as accepted_twice,
  (select coalesce(sum(accepted), 0)::bigint from per_task) as accepted,
  (select coalesce(sum(attempts), 0)::bigint from per_task) as attempts,
  (select count(*) from windlass.events where code = 'TASK_ERROR') as failed_attempts,
  (select count(*) from windlass.events where code = 'TASK_REQUEUED') as lost_attempts,
  (select count(*) from windlass.events where code = 'LATE_RESULT') as late_results,
  (select percentile_cont(0.5) within group (order by extract(epoch from wait)) from per_task)::double precision as wait_p50_s,
  (select percentile_cont(0.95) within group (order by extract(epoch from wait)) from per_task)::double precision as wait_p95_s;

-- name: recoveries
-- The tasks that a lost worker held: who noticed, how soon after $1, and who completed them.
select
  requeued.task_id,
  requeued.worker_id as lost_worker_id,
  lost.detail ->> 'judge' as noticed_by,
  extract(epoch from requeued.at - $1::timestamptz)::double precision as noticed_after_s,
  task.worker_id as completed_by
from windlass.events requeued
join windlass.events lost on lost.worker_id = requeued.worker_id and lost.code = 'WORKER_LOST'
left join windlass.tasks task on task.id = requeued.task_id and task.status = 'complete'
where requeued.code = 'TASK_REQUEUED'
order by requeued.id;
