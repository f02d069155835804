-- The least a queue in PostgreSQL can do and still keep Windlass' books: the same columns, written at the same times,
-- every finish naming its claim. One index to claim by, no other index, check or trigger.

-- name: schema
create table bare_tasks (
  id bigint generated always as identity primary key,
  queue text not null,
  status text not null default 'queued',
  priority integer not null default 0,
  attempts integer not null default 0,
  max_attempts integer not null default 3,
  timeout_s double precision,
  run_after timestamptz,
  created_at timestamptz not null default now(),
  started_at timestamptz,
  finished_at timestamptz,
  claim_token uuid,
  worker_id text,
  unique_key text,
  progress real,
  progress_note text,
  error_code text,
  error text,
  payload jsonb not null default 'null',
  result jsonb
);
create index bare_tasks_ready on bare_tasks (queue, priority desc, id) where status = 'queued';

-- name: turn
-- Finish the last task and claim the next.
with done as (
  update bare_tasks
  set status = 'complete', result = $3, finished_at = now()
  where id = $1
    and claim_token = $2
    and status = 'running'
)
update bare_tasks
set status = 'running', claim_token = gen_random_uuid(), worker_id = $5, attempts = attempts + 1, started_at = now()
where id = (
  select id
  from bare_tasks
  where queue = $4
    and status = 'queued'
  order by priority desc, id
  limit 1
  for update skip locked
)
returning id, claim_token, payload, attempts, max_attempts, timeout_s;

-- name: turn_batch
-- The same for many. `= any (array(...))` and not a join, which the planner would make a scan of the whole table.
with done as (
  update bare_tasks t
  set status = 'complete', result = f.result, finished_at = now()
  from unnest($1::bigint[], $2::uuid[], $3::jsonb[]) as f (id, token, result)
  where t.id = f.id
    and t.claim_token = f.token
    and t.status = 'running'
)
update bare_tasks
set status = 'running', claim_token = gen_random_uuid(), worker_id = $5, attempts = attempts + 1, started_at = now()
where id = any (array(
  select id
  from bare_tasks
  where queue = $4
    and status = 'queued'
  order by priority desc, id
  limit $6
  for update skip locked
))
returning id, claim_token, payload, attempts, max_attempts, timeout_s;
