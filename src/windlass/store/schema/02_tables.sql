-- All tables, each with its indexes.


-- ---------------------------------------------------------------------------------------------- API tokens

-- API tokens of people and programs. Only hashes (SHA-256) are stored: a token is 256 random bits, so its hash need not
-- be slow to compute.
create table windlass.tokens (
  id bigint generated always as identity primary key,
  name windlass.name not null,
  role text not null check (role in ('viewer', 'producer', 'operator', 'admin', 'worker')),
  hash bytea not null unique,
  -- The queues and fleets that the token may reach. Both empty: everything.
  queues text[] not null default '{}' check (cardinality(queues) <= 100),
  fleets text[] not null default '{}' check (cardinality(fleets) <= 100),
  created_at timestamptz not null default windlass.now(),
  created_by text default nullif(current_setting('windlass.actor', true), ''),
  -- Null: never.
  expires_at timestamptz,
  last_used_at timestamptz,
  revoked_at timestamptz
);
create unique index tokens_name on windlass.tokens (name) where revoked_at is null;

-- Dashboard sessions by the hash of the browser's cookie, and login links (`is_link`) by the hash of the link.
create table windlass.sessions (
  hash bytea primary key,
  is_link boolean not null,
  role text not null check (role in ('viewer', 'operator', 'admin')),
  -- The person: given with the link, or by the identity provider.
  name text not null default 'dashboard' check (length(name) between 1 and 190),
  created_at timestamptz not null default windlass.now(),
  expires_at timestamptz not null
);

-- Processes of `windlass up` and `windlass serve`. Each renews its row every few seconds and deletes it when it stops.
-- Unlogged: after a crash of the database it is empty, and filled again within seconds.
create unlogged table windlass.processes (
  id uuid primary key,
  kind text not null check (kind in ('control', 'server')),
  -- The number of the server process in its `windlass up` or `windlass serve`.
  number integer not null,
  host text not null,
  pid integer not null,
  version text not null,
  -- Servers only: the URL for browsers. A loopback URL refers to `host`.
  url text,
  -- Control processes only: address and versions of the Ray head, without its credentials.
  ray_head jsonb,
  -- Values for metrics.
  gauges jsonb not null default '{}',
  started_at timestamptz not null default windlass.now(),
  seen_at timestamptz not null default windlass.now()
);

-- Counters for metrics, as sums over all processes that ever ran. `labels` are in the order of model/counters.py.
create table windlass.counters (
  name text not null,
  labels text[] not null,
  value double precision not null,
  updated_at timestamptz not null default windlass.now(),
  primary key (name, labels)
);

-- Cycles that HTTP servers requested. A control process runs them and writes their summaries.
create unlogged table windlass.cycle_requests (
  id bigint generated always as identity primary key,
  requested_at timestamptz not null default windlass.now(),
  -- Null: not answered yet.
  summaries jsonb
);
create index cycle_requests_open on windlass.cycle_requests (id) where summaries is null;


-- -------------------------------------------------------------------------------------------------- fleets

-- A group of workers with one provider, one policy, the queues it serves, a minimum and a maximum.
create table windlass.fleets (
  name windlass.name primary key,
  provider text not null default 'local',
  queues text[] not null default '{}',
  min_workers integer not null default 0 check (min_workers >= 0),
  max_workers integer not null default 10 check (max_workers >= min_workers),
  paused boolean not null default false,
  created_at timestamptz not null default windlass.now(),
  -- PlannerState of model/snapshot.py: what the planner passes from one cycle to the next.
  planner_state jsonb not null default '{}',
  -- Workers that a person requested and that are not spawned yet.
  requested_workers integer not null default 0 check (requested_workers >= 0),
  -- When a person last ran `windlass restart`: failures before this no longer count.
  reset_at timestamptz,
  -- The same for the whole fleet only, not for one slot. It also abandons machines of another account.
  restarted_at timestamptz,
  -- The last `windlass deploy`: DeployRequest of model/rollout.py.
  deploy jsonb
);

-- A numbered place of a fleet for one worker. A slot outlives its workers, so restarts are counted here.
create table windlass.slots (
  fleet text not null references windlass.fleets (name) on delete cascade,
  slot integer not null check (slot >= 0),
  status text not null default 'ok' check (status in ('ok', 'failed')),
  restart_count integer not null default 0,
  last_restart_at timestamptz,
  failed_at timestamptz,
  failed_reason text,
  created_at timestamptz not null default windlass.now(),
  -- The last worker in this slot failed: the next one replaces it.
  needs_replacement boolean not null default false,
  -- When workers in this slot failed, newest last, at most 100.
  restarts timestamptz[] not null default '{}',
  primary key (fleet, slot)
);


-- ------------------------------------------------------------------------------------------------- workers

-- One incarnation of a worker, from the decision to spawn it until it is terminated. `status` is the only lifecycle
-- field. Health is derived from the times below in every cycle and never stored.
--
-- A statement or transaction that writes several workers locks them in the order of their ids first (lock_workers), or
-- skips locked ones. Different orders would deadlock. A fleet's row is locked before its workers.
create table windlass.workers (
  id text primary key,
  fleet text not null references windlass.fleets (name),
  -- Null for a worker that a person started by hand: the control plane did not spawn it and does not replace it.
  slot integer,
  status text not null
    check (status in ('spawning', 'active', 'terminating', 'error', 'terminated')),
  paused boolean not null default false,
  queues text[] not null default '{}',
  -- A worker claims and runs tasks itself. A dispatcher claims tasks and places them on nodes, which run them.
  kind text not null default 'worker' check (kind in ('worker', 'node', 'dispatcher')),
  -- Nodes only: what Ray last reported about it (see report_nodes).
  node jsonb,
  concurrency integer not null default 1 check (concurrency between 1 and 10000),
  -- A worker without a heartbeat for longer than this is lost, and its tasks are requeued.
  -- A longer lease than a day would hide a lost worker.
  lease_s double precision not null default 30 check (lease_s between 1 and 86400),
  created_at timestamptz not null default windlass.now(),
  activated_at timestamptz,
  -- Without a default: only the worker's own heartbeat proves that it runs.
  last_heartbeat timestamptz,
  -- Since when no gap between heartbeats was long enough to hide an outage. A worker needs this to judge others.
  heartbeat_gapless_since timestamptz,
  -- Set once, by the first claim, so that "has it ever claimed" does not count tasks.
  first_claimed_at timestamptz,
  terminating_at timestamptz,
  terminated_at timestamptz,
  -- When it failed. Null if a person or the scaling terminated it.
  failed_at timestamptz,
  -- It had proven to work when it failed (policy/derive.py), so its failure says nothing about later spawns.
  is_proven boolean not null default false,
  code text,
  reason text,
  host text,
  pid integer,
  -- New for every start of the worker's program. A pid may repeat; in a container it nearly always does.
  start_id text,
  version text,
  -- Of the code and settings that the control plane spawned it with. Null: started by hand, or unknown.
  fingerprint text,
  late_results integer not null default 0,
  -- Different tasks that failed on it since it last completed one, newest last, at most 100; and when the first failed.
  failed_tasks bigint[] not null default '{}',
  failing_since timestamptz,
  metadata windlass.worker_metadata not null default '{}',

  -- The provider that was asked for the machine. A fleet may change its provider; a machine cannot.
  provider text,
  -- Outcome of the call that creates the machine. Null: no answer yet.
  creation text check (creation in ('created', 'ambiguous', 'refused')),
  machine_id text,
  -- When the provider created the machine, by its own clock: the start of its bill.
  machine_created_at timestamptz,
  -- When the machine became known to us. A machine list requested earlier says nothing about it.
  machine_at timestamptz,
  instance_type text,
  -- The provider's name of its location: nbg1.
  place text,
  -- The machine's address, and that of the physical host that runs it, as far as the provider reports them.
  address text,
  machine_host text,
  -- Phases of the boot: the provider reported the machine as running; the machine first reached the control plane, or
  -- the control plane the machine. Before them created_at (requested), after them joined_at and first_claimed_at.
  running_at timestamptz,
  reachable_at timestamptz,
  -- The last step that the machine reported before it joined, and all of them: [{"step", "at"}], at most 40.
  boot_step text,
  boot_step_at timestamptz,
  boot_steps jsonb not null default '[]',
  -- When starting the worker's program on the machine began, and when it was done; or why it cannot be done.
  preparing_at timestamptz,
  prepared_at timestamptz,
  prepare_code text,
  prepare_reason text,
  -- SSH host key that the machine presented on the first connection.
  host_key text,
  vram_total_mb integer,
  vram_used_mb integer,
  vram_at timestamptz,
  -- Since when it reports a GPU with zero memory without interruption, after it had reported some.
  vram_lost_at timestamptz,

  price_micros_per_hour bigint,
  -- Components of the price whose monthly total is capped: [[micros per hour, micros per month]].
  price_parts jsonb not null default '[]',
  currency text,
  -- The machine is billed in whole units of this length, from billed_since until billed_until.
  billing_unit_s integer,
  billed_since timestamptz,
  billed_until timestamptz,
  -- Billing units that began before this time are in the ledger.
  settled_until timestamptz,
  -- When the next part can be settled. Null: no bill, or the bill is closed.
  settle_at timestamptz,

  -- The machine joins over HTTP with this token, once and before it expires. Only the hash is stored.
  join_token_hash bytea,
  join_expires_at timestamptz,
  -- The worker token that the machine got for its join token. Valid until the worker is terminated.
  token_hash bytea,
  joined_at timestamptz,
  -- The API token with which the worker registered itself. Revoking that token ends the worker's access.
  registered_by bigint references windlass.tokens (id),
  -- The secret of a worker that calls the functions of this schema itself. Not token_hash: a secret of the database must
  -- not open the HTTP server, which sends a fleet's environment to its workers.
  secret_hash bytea,

  foreign key (fleet, slot) references windlass.slots (fleet, slot)
)
-- Heartbeats update the same few rows all day. Free space in the page keeps these updates out of the indexes.
with (fillfactor = 50);

-- Enforces the maximum: slots are numbered 0 to max-1, and each holds at most one worker that is not terminated.
create unique index workers_one_live_per_slot
  on windlass.workers (fleet, slot)
  where status in ('spawning', 'active', 'terminating', 'error');

create index workers_live on windlass.workers (fleet) where status <> 'terminated';
-- Lists of live workers in the order of their slots. Heartbeats change none of these columns.
create index workers_by_slot on windlass.workers (fleet, coalesce(slot, 2147483647), id) where status <> 'terminated';
create index workers_terminated_at on windlass.workers (terminated_at) where status = 'terminated';
-- The number of terminated workers of a fleet, for metrics.
create index workers_terminated_by_fleet on windlass.workers (fleet) where status = 'terminated';
create index workers_to_settle on windlass.workers (fleet, settle_at) where settle_at is not null;
create index workers_managed on windlass.workers (fleet, created_at, id collate "C") where slot is not null;
create index workers_failed on windlass.workers (fleet, failed_at) where failed_at is not null;
create index workers_failing on windlass.workers (fleet) where failing_since is not null;
create unique index workers_join_token on windlass.workers (join_token_hash) where join_token_hash is not null;
create unique index workers_token on windlass.workers (token_hash) where token_hash is not null;


-- --------------------------------------------------------------------------------------------------- tasks

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


-- ------------------------------------------------------------------------------- events, cycles, leases, logs

-- Every transition except the normal path of a task (claimed, completed: those times are in its row), with a code for
-- programs and a reason for people.
create table windlass.events (
  id bigint generated always as identity primary key,
  at timestamptz not null default windlass.now(),
  code text not null,
  reason text not null,
  fleet text,
  worker_id text check (length(worker_id) <= 200),
  task_id bigint,
  cycle_id bigint,
  detail jsonb,
  -- The person or program whose request caused it (model/actor.py). Null: the control loop or a worker.
  actor text default nullif(current_setting('windlass.actor', true), '')
);
-- Serves the audit list.
create index events_actor on windlass.events (id) where actor is not null;
create index events_task on windlass.events (task_id, id) where task_id is not null;
create index events_worker on windlass.events (worker_id, id) where worker_id is not null;
create index events_at on windlass.events (at);
-- Lists of failed attempts in a range of time.
create index events_errors on windlass.events (at, id) where code in ('TASK_ERROR', 'TASK_FAILED', 'TASK_REQUEUED');
-- Alert evaluation reads the planner's alerts of the last hours every few seconds.
create index events_alert on windlass.events (at) where code = 'ALERT';

-- What each cycle observed and decided. `windlass explain` and `windlass replay` read it.
create table windlass.cycles (
  id bigint generated always as identity primary key,
  fleet text not null,
  term bigint not null,
  started_at timestamptz not null,
  finished_at timestamptz,
  snapshot jsonb not null,
  plan jsonb not null,
  summary jsonb,
  decision text,
  -- How many of the following cycles had the same decision and no action, and when the last was. They are not stored.
  repeats integer not null default 0,
  repeated_at timestamptz,
  -- The decision of the last of them, if its numbers differ. Only cycles with a large snapshot repeat such a decision.
  last_decision text,
  -- It had actions, or another kind of decision than the cycle before it (windlass_internal.decision_kind).
  is_change boolean not null default true
);
create index cycles_fleet on windlass.cycles (fleet, id);
create index cycles_changes on windlass.cycles (fleet, id) where is_change;
create index cycles_started on windlass.cycles (started_at);

-- One holder per name. `term` grows with every change of holder; every write of a holder checks it. A lease that ends
-- later than ttl_s from now was written before the clock was set back: acquire_lease_term shortens it.
create table windlass.leases (
  name text primary key,
  holder text not null,
  term bigint not null,
  expires_at timestamptz not null,
  ttl_s double precision not null check (ttl_s > 0 and ttl_s <= 315360000)
);

-- The latest time that follow_clock has seen. A time before it means that the database's clock was set back.
create table windlass.clock (
  seen_at timestamptz not null,
  is_only boolean primary key default true check (is_only)
);

-- Log lines of orchestrators, if `logs.in_database` is set. Kept for `retention.logs_s`.
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
create index logs_worker on windlass.logs (worker_id, id) where worker_id is not null;


-- --------------------------------------------------------------------------------------------------- costs

-- Ended attempts on workers with a price, until the ledger has settled their time. A task's row keeps only its last
-- attempt.
create table windlass.attempt_spans (
  worker_id text not null,
  task_id bigint not null,
  queue text not null,
  from_at timestamptz not null,
  until_at timestamptz not null check (until_at > from_at),
  primary key (worker_id, from_at, task_id)
);
create index attempt_spans_until on windlass.attempt_spans (until_at);

-- The ledger: what a worker's billed time was used for, in integer micros of a currency. The charges of a worker add up
-- to its bill. from_at and until_at are the billed time that a charge is part of. Without foreign keys: charges are
-- kept longer than the workers and tasks they name.
create table windlass.charges (
  id bigint generated always as identity primary key,
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
-- The same time cannot be charged twice.
create unique index charges_once on windlass.charges (worker_id, from_at, kind, coalesce(task_id, 0));
create index charges_task on windlass.charges (task_id) where task_id is not null;
-- Serves reports and retention.
create index charges_from on windlass.charges (from_at);

-- Sums of the ledger per fleet, queue and hour of the clock. Budgets are compared with them in every cycle.
create table windlass.spending (
  fleet text not null,
  hour timestamptz not null,
  currency text not null,
  -- Empty for charges without a queue: boot, idle and tail.
  queue text not null default '',
  task_micros bigint not null default 0,
  boot_micros bigint not null default 0,
  idle_micros bigint not null default 0,
  tail_micros bigint not null default 0,
  primary key (fleet, hour, currency, queue)
);
create index spending_hour on windlass.spending (hour);


-- ------------------------------------------------------------------------------------- charts and alerts

-- State of a fleet at a moment, for charts. A cycle's snapshot contains every worker and is too large to read
-- thousands.
create table windlass.samples (
  fleet text not null,
  at timestamptz not null,
  queued integer not null,
  running integer not null,
  spawning integer not null,
  active integer not null,
  terminating integer not null,
  error integer not null,
  completed_per_minute real not null,
  wait_p95_s real,
  -- In the currency with the highest rate. Null if no machine has a price.
  burn_micros_per_hour bigint,
  currency text,
  primary key (fleet, at)
);
create index samples_at on windlass.samples (at);

-- Averages of the samples over five minutes, for charts of days. Kept longer than samples. `at`: start of the interval.
create table windlass.sample_averages (
  fleet text not null,
  at timestamptz not null,
  queued real not null,
  running real not null,
  spawning real not null,
  active real not null,
  terminating real not null,
  error real not null,
  completed_per_minute real not null,
  -- The longest.
  wait_p95_s real,
  burn_micros_per_hour bigint,
  currency text,
  primary key (fleet, at)
);
create index sample_averages_at on windlass.sample_averages (at);

-- One row per alert, from firing to resolved. `key` says what it concerns ("SLOT_FAILED 3").
create table windlass.alerts (
  id bigint generated always as identity primary key,
  fleet text,
  key text not null,
  code text not null,
  severity text not null check (severity in ('warning', 'critical')),
  reason text not null,
  since timestamptz not null default windlass.now(),
  seen_at timestamptz not null default windlass.now(),
  resolved_at timestamptz
);
-- At most one open alert per fleet and key.
create unique index alerts_open on windlass.alerts (coalesce(fleet, ''), key) where resolved_at is null;
create index alerts_resolved on windlass.alerts (resolved_at) where resolved_at is not null;

-- Outbox: one message per alert, notifier and kind. It is written in the transaction that fires or resolves the alert,
-- so a restart neither loses nor repeats it. A sender claims it for a limited time.
create table windlass.messages (
  id bigint generated always as identity primary key,
  alert_id bigint not null references windlass.alerts (id) on delete cascade,
  notifier text not null,
  kind text not null check (kind in ('firing', 'resolved')),
  due_at timestamptz not null default windlass.now(),
  attempts integer not null default 0,
  delivered_at timestamptz,
  abandoned_at timestamptz,
  error text,
  unique (alert_id, notifier, kind)
);
create index messages_due on windlass.messages (due_at) where delivered_at is null and abandoned_at is null;
