-- Tables of events, cycles, leases and logs, each with its indexes.

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
  -- As text: converting the snapshot of 10,000 workers to jsonb takes 130 MB, which the server process keeps.
  snapshot json not null,
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
  -- recover_lost_workers returns without a search until this time: at most a second after a search that found nothing.
  judged_until timestamptz,
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
