-- Tables of fleets, slots and workers, each with its indexes.

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
  -- It had proven to work when it failed (policy/worker_state.py), so its failure says nothing about later spawns.
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
  -- When the last event LATE_RESULT was written for it.
  late_event_at timestamptz,
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
  -- The secret of a worker that calls the functions of this schema itself. Not token_hash: a secret of the database
  -- must not open the HTTP server, which sends a fleet's environment to its workers.
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
