-- Tables of tasks and queues, each with its indexes.

-- One unit of work. queued -> running -> complete; or running -> error (retrying) -> queued; or running -> failed (dead
-- letter). In every row: run_after is set only if the status is queued or error; a running task has claim_token,
-- worker_id and started_at, and no finished_at.
create table windlass.tasks (
  id bigint generated always as identity primary key,
  queue windlass.name not null,
  status windlass.task_status not null default 'queued',
  priority integer not null default 0,
  -- Attempts started. Counted by the claim, so that an attempt whose worker dies counts too.
  attempts integer not null default 0,
  max_attempts windlass.attempt_limit not null default 3,
  timeout_s windlass.time_limit_s,
  -- The task does not start before this time. Null: ready. Only ready tasks are in the index that claims read.
  run_after windlass.due_time,
  created_at timestamptz not null default windlass.now(),
  -- When it became ready, if later than created_at: its run_after passed, or it was requeued.
  ready_at timestamptz,
  started_at timestamptz,
  finished_at timestamptz,
  -- Identifies the current (or last) attempt. Every completion, failure and heartbeat names it.
  claim_token uuid,
  worker_id text,
  unique_key windlass.task_key,
  progress real,
  progress_note windlass.progress_note,
  error_code windlass.error_code,
  error text,
  payload jsonb not null default 'null',
  -- Workers have a lower limit of their own (max_payload_bytes).
  result jsonb check (pg_column_size(result) <= 67108864),
  -- Who enqueued it: the actor of the session (model/actor.py), or the signed-in end user of PostgREST (`jwt:SUB`). A
  -- producer's token reads its own tasks only.
  owner windlass.task_owner default nullif(current_setting('windlass.actor', true), ''),
  -- The adopted table (windlass.adoptions) whose row this task belongs to. Its unique_key is then the key of the row.
  adoption text
)
-- Claimed tasks leave dead entries at the head of tasks_ready, and every claim scans them. So autovacuum starts after a
-- fixed number of dead rows, not after a share of the table.
with (
  autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0
);

-- Serves claims: the first entry is the head of the queue. Finished tasks are not in it and cost nothing.
create index tasks_ready on windlass.tasks (queue, priority desc, id)
  where status = 'queued' and run_after is null;

-- Serves the step of a claim that makes due tasks ready, and next_run_after. Scheduled and retrying tasks.
create index tasks_scheduled on windlass.tasks (queue, run_after)
  where run_after is not null;

-- Serves heartbeat, requeue and every list of a worker's running tasks.
create index tasks_running on windlass.tasks (worker_id)
  where status = 'running';

-- Serve retention, retry_failed and statistics of recent tasks. One index per status, because each status has its own
-- retention: the search for the oldest rows of one status must not scan the rows kept of the other.
create index tasks_complete on windlass.tasks (finished_at)
  where status = 'complete';
create index tasks_failed on windlass.tasks (finished_at)
  where status = 'failed';

-- Serves the list of an end user's tasks. Tasks of other producers are not in it.
create index tasks_of_end_user on windlass.tasks (owner, id)
  where owner like 'jwt:%';

-- Serves the limit on an end user's unfinished tasks.
create index tasks_unfinished_of_end_user on windlass.tasks (owner, queue)
  where owner like 'jwt:%' and status in ('queued', 'running', 'error');

-- One row per key while the row exists: enqueueing the same key twice is safe.
create unique index tasks_unique_key on windlass.tasks (queue, unique_key)
  where unique_key is not null and adoption is null;

-- One task per row of an adopted table.
create unique index tasks_adopted on windlass.tasks (adoption, unique_key)
  where adoption is not null;


-- The queues that signed-in end users may enqueue into (submit_task). The owner inserts them; at first there are none.
create table windlass.open_queues (
  queue windlass.name primary key,
  -- Tasks of one user in this queue that are not finished.
  max_unfinished integer not null default 100 check (max_unfinished between 1 and 10000),
  max_payload_bytes integer not null default 65536 check (max_payload_bytes between 1 and 1048576)
);
