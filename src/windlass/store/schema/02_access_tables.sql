-- Tables of API tokens, sessions and server processes, each with its indexes.

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
