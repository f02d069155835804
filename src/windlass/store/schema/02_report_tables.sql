-- Tables of costs, charts and alerts, each with its indexes.

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
