-- Windlass keeps everything it knows in this schema: what is to be done (tasks), who does it (fleets, slots,
-- workers), what happened and why (events, cycles, logs), who may decide (leases) and what it cost (charges).
--
-- Statuses are text with a check, not enum types: a new value is then an ordinary transactional migration.

create schema if not exists windlass;
create schema if not exists windlass_internal;

create table windlass.migrations (
  version integer primary key,
  name text not null,
  checksum text not null,
  applied_at timestamptz not null default clock_timestamp()
);

-- The only clock of leases, ages, back-off and bills. Tests set `windlass.now` on their connection and so drive a
-- real PostgreSQL in virtual time; otherwise it is the start of the caller's statement.
create function windlass.now() returns timestamptz
language sql stable parallel safe
as $$
  select coalesce(
    nullif(current_setting('windlass.now', true), '')::timestamptz,
    statement_timestamp()
  )
$$;

-- A name people type: queues, fleets. Short enough for a label, safe in a channel, a path and a metric. The length is
-- not counted by the expression, which would make it five times as slow, for every row that is enqueued.
create function windlass_internal.is_name(p_name text) returns boolean
language sql immutable parallel safe
as $$ select length(p_name) <= 63 and p_name ~ '^[A-Za-z0-9][A-Za-z0-9_.:-]*$' $$;

-- The rules of a task's columns are domains and not checks: a domain looks at a value when it is set. A check is read,
-- planned and run again by every statement that touches the row, and that is a tenth of the time of a claim.
create domain windlass.name as text check (windlass_internal.is_name(value));
create domain windlass.task_status as text check (value in ('queued', 'running', 'complete', 'error', 'failed'));
create domain windlass.task_key as text check (length(value) between 1 and 200);
create domain windlass.attempt_limit as integer check (value >= 1);
create domain windlass.time_limit_s as double precision check (value > 0 and value < 'infinity');
-- What every reader's calendar can hold, whatever its time zone. One row beyond it, and no list with it could be read.
create domain windlass.due_time as timestamptz
  check (value >= '0002-01-01 00:00+00' and value < '9999-01-01 00:00+00');


-- ---------------------------------------------------------------------------------------------------- fleets

-- A group of workers with one provider, one policy, the queues it serves, a min and a max.
create table windlass.fleets (
  name windlass.name primary key,
  provider text not null default 'local',
  queues text[] not null default '{}',
  min_workers integer not null default 0 check (min_workers >= 0),
  max_workers integer not null default 10 check (max_workers >= min_workers),
  paused boolean not null default false,
  created_at timestamptz not null default windlass.now()
);

-- A numbered place in a fleet. It outlives its workers, so it is where restarts are counted.
create table windlass.slots (
  fleet text not null references windlass.fleets (name) on delete cascade,
  slot integer not null check (slot >= 0),
  status text not null default 'ok' check (status in ('ok', 'failed')),
  restart_count integer not null default 0,
  last_restart_at timestamptz,
  failed_at timestamptz,
  failed_reason text,
  created_at timestamptz not null default windlass.now(),
  primary key (fleet, slot)
);


-- --------------------------------------------------------------------------------------------------- workers

-- One incarnation of a worker, from intent to terminated. `status` is the only lifecycle field; health is derived
-- from the times below in every cycle and never stored.
create table windlass.workers (
  id text primary key,
  fleet text not null references windlass.fleets (name),
  -- Null for a worker that a person started by hand: nobody hired it, so it has no place to be rehired into.
  slot integer,
  status text not null
    check (status in ('spawning', 'active', 'terminating', 'error', 'terminated')),
  paused boolean not null default false,
  queues text[] not null default '{}',
  -- A worker claims and runs tasks itself. A node runs what a dispatcher places on it; a dispatcher claims, and places.
  kind text not null default 'worker' check (kind in ('worker', 'node', 'dispatcher')),
  -- Of a node: what its engine last said of it (see report_nodes).
  node jsonb,
  concurrency integer not null default 1 check (concurrency >= 1),
  -- Silent for longer than this, a worker counts as lost and its tasks go to others.
  lease_s double precision not null default 30 check (lease_s > 0 and lease_s < 'infinity'),
  created_at timestamptz not null default windlass.now(),
  activated_at timestamptz,
  -- Never has a default: only the worker's own heartbeat proves that it runs.
  last_heartbeat timestamptz,
  -- Since when heartbeats came without a gap that could hide an outage. Whoever judges others must have this itself.
  heartbeat_gapless_since timestamptz,
  -- Set by the first claim and never again, so that "has it ever claimed" costs no count over tasks.
  first_claimed_at timestamptz,
  terminating_at timestamptz,
  terminated_at timestamptz,
  code text,
  reason text,
  host text,
  pid integer,
  -- Made up anew whenever the worker's program starts. A pid may be the same again, in a container nearly always.
  start_id text,
  version text,
  instance_type text,
  -- Where its machine is, in the provider's words: nbg1.
  place text,
  machine_id text,
  vram_total_mb integer,
  vram_used_mb integer,
  vram_at timestamptz,
  -- Since when it has reported a GPU of zero memory without a break, having reported some before.
  vram_lost_at timestamptz,
  late_results integer not null default 0,
  price_micros_per_hour bigint,
  -- What the price is made of, where a calendar month of each part has a limit: [[micros per hour, per month]].
  price_parts jsonb not null default '[]',
  currency text,
  -- Its machine is paid in whole units of this length, from then on, and until it was gone.
  billing_unit_s integer,
  billed_since timestamptz,
  billed_until timestamptz,
  -- What began before this is in the ledger; and when there is more to put into it. Null: never, or never again.
  settled_until timestamptz,
  settle_at timestamptz,
  metadata jsonb not null default '{}',
  foreign key (fleet, slot) references windlass.slots (fleet, slot)
)
-- Heartbeats rewrite the same few rows all day: room in the page keeps those updates out of the indexes.
with (fillfactor = 50);

-- "Never more than max" as a constraint: slots are numbered 0 to max-1 and each holds at most one live worker.
create unique index workers_one_live_per_slot
  on windlass.workers (fleet, slot)
  where status in ('spawning', 'active', 'terminating', 'error');

create index workers_live on windlass.workers (fleet) where status <> 'terminated';
create index workers_terminated_at on windlass.workers (terminated_at) where status = 'terminated';
create index workers_to_settle on windlass.workers (fleet, settle_at) where settle_at is not null;


-- ----------------------------------------------------------------------------------------------------- tasks

-- One unit of work. Life: queued -> running -> complete; or running -> error (waits for its retry) -> queued;
-- or running -> failed, the dead letter. What holds of every row: only queued and error wait (run_after), and a running
-- one has its claim_token, worker_id, started_at and no finished_at.
create table windlass.tasks (
  id bigint generated always as identity primary key,
  queue windlass.name not null,
  status windlass.task_status not null default 'queued',
  priority integer not null default 0,
  -- Attempts begun. Counted when claimed, so that a worker's death under a task counts too.
  attempts integer not null default 0,
  max_attempts windlass.attempt_limit not null default 3,
  timeout_s windlass.time_limit_s,
  -- Not before this time. Null means ready, and only ready tasks stand in the index that claims read.
  run_after windlass.due_time,
  created_at timestamptz not null default windlass.now(),
  -- Since when it could have been claimed, where that is later than created_at: its time came, or it was put back.
  ready_at timestamptz,
  started_at timestamptz,
  finished_at timestamptz,
  -- The right to the present (or last) attempt. Every finish, failure and heartbeat names it.
  claim_token uuid,
  worker_id text,
  unique_key windlass.task_key,
  progress real,
  progress_note text,
  error_code text,
  error text,
  payload jsonb not null default 'null',
  result jsonb
)
-- Claimed tasks leave dead entries at the head of tasks_ready, and every claim walks over them. So they are cleared away
-- by their number, and not when they have become a fifth of what is kept.
with (
  autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0
);

-- Serves claim_tasks: the queue's head is the first entry. Finished rows are not in it, so they cost nothing.
create index tasks_ready on windlass.tasks (queue, priority desc, id)
  where status = 'queued' and run_after is null;

-- Serves the step of claim_tasks that makes due tasks ready, and next_run_after.
create index tasks_scheduled on windlass.tasks (queue, run_after)
  where run_after is not null;

-- Serves heartbeat, requeue and every question "what is this worker doing".
create index tasks_running on windlass.tasks (worker_id)
  where status = 'running';

-- Serve retention, retry_failed and the statistics of recent work. One for each status, because each is kept for its own
-- time: whoever looks for the oldest must not walk over all that is still kept of the other. Appended at the right end.
create index tasks_complete on windlass.tasks (finished_at)
  where status = 'complete';
create index tasks_failed on windlass.tasks (finished_at)
  where status = 'failed';

-- Makes enqueueing twice safe: one row per key for as long as the row is kept.
create unique index tasks_unique_key on windlass.tasks (queue, unique_key)
  where unique_key is not null;


-- -------------------------------------------------------------------------------------- what happened and why

-- Every transition that was not the plain path of a task (claimed, completed: those times stand in its row), with
-- a code for machines and a reason in words.
create table windlass.events (
  id bigint generated always as identity primary key,
  at timestamptz not null default windlass.now(),
  code text not null,
  reason text not null,
  fleet text,
  worker_id text,
  task_id bigint,
  cycle_id bigint,
  detail jsonb
);
create index events_task on windlass.events (task_id, id) where task_id is not null;
create index events_worker on windlass.events (worker_id, id) where worker_id is not null;
create index events_at on windlass.events (at);

-- What each turn of the control loop saw and decided. `windlass explain` and `replay` read it.
create table windlass.cycles (
  id bigint generated always as identity primary key,
  fleet text not null,
  term bigint not null,
  started_at timestamptz not null,
  finished_at timestamptz,
  snapshot jsonb not null,
  plan jsonb not null,
  summary jsonb
);
create index cycles_fleet on windlass.cycles (fleet, id);
create index cycles_started on windlass.cycles (started_at);

-- One holder per name; `term` grows with every change of holder and is checked by each of the holder's writes.
create table windlass.leases (
  name text primary key,
  holder text not null,
  term bigint not null,
  expires_at timestamptz not null
);

-- Attempts that have ended on workers whose time has a price, until the ledger has closed that time. A task's row only
-- remembers its last attempt.
create table windlass.attempt_spans (
  worker_id text not null,
  task_id bigint not null,
  queue text not null,
  from_at timestamptz not null,
  until_at timestamptz not null check (until_at > from_at),
  primary key (worker_id, from_at, task_id)
);
create index attempt_spans_until on windlass.attempt_spans (until_at);

-- The ledger: what a worker's time was spent on, in integer micros of a currency. The parts of a worker add up to its
-- bill. from_at and until_at are the paid time that this is a part of.
create table windlass.charges (
  id bigint generated always as identity primary key,
  -- No foreign keys: what was paid is remembered for longer than who was paid, and what for.
  worker_id text not null,
  fleet text not null,
  task_id bigint,
  queue text,
  kind text not null check (kind in ('task', 'boot', 'idle', 'tail')),
  from_at timestamptz not null,
  until_at timestamptz not null check (until_at >= from_at),
  amount_micros bigint not null,
  currency text not null
);
-- Nothing can be charged twice.
create unique index charges_once on windlass.charges (worker_id, from_at, kind, coalesce(task_id, 0));
create index charges_task on windlass.charges (task_id) where task_id is not null;
-- Serves reports and retention.
create index charges_from on windlass.charges (from_at);

-- The ledger's sums for each fleet, queue and hour of the clock: what a budget is compared with in every cycle, and what
-- people look at.
create table windlass.spending (
  fleet text not null,
  hour timestamptz not null,
  currency text not null,
  -- Empty for what was for no queue: boot, idle and tail.
  queue text not null default '',
  task_micros bigint not null default 0,
  boot_micros bigint not null default 0,
  idle_micros bigint not null default 0,
  tail_micros bigint not null default 0,
  primary key (fleet, hour, currency, queue)
);
create index spending_hour on windlass.spending (hour);

-- Log lines of orchestrators, where `logs.in_database` is set. Kept for `retention.logs_s`.
create table windlass.logs (
  id bigint generated always as identity primary key,
  at timestamptz not null default windlass.now(),
  level text not null,
  message text not null,
  worker_id text,
  cycle_id bigint,
  fields jsonb
);
create index logs_at on windlass.logs (at);

-- Nothing here is for everybody: grants.sql has the rights of those who produce or work.
revoke all on schema windlass, windlass_internal from public;
