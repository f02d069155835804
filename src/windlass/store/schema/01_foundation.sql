-- Schemas, the clock, versions and the domains of column values.
--
-- `windlass` holds the tables, the views and the public functions: the contract with producers and workers in any
-- language (docs/sql.md lists it). `windlass_internal` holds all other functions and may change with every release.
-- Statuses are text with a check, not enum types: adding a value is then an ordinary transactional migration.

create schema if not exists windlass;
create schema if not exists windlass_internal;
-- The generated functions of adopted tables (12_adoption.sql). Some of them belong to the owners of those tables.
create schema if not exists windlass_adopt;

-- What was applied to this database: the schema that created it, then one row per migration.
create table windlass.migrations (
  version integer primary key,
  name text not null,
  checksum text not null,
  applied_at timestamptz not null default clock_timestamp()
);

-- The contract versions that this database supports. Within a contract version no public function changes its signature
-- or its meaning. An incompatible change adds `name_v2`, raises `newest`, and keeps the old function for at least one
-- release; `oldest` rises when the old function is dropped. Workers and clients check that theirs lies in this range.
create function windlass.contract_versions(out oldest integer, out newest integer)
language sql immutable parallel safe
as $$ select 1, 1 $$;

-- The only clock of leases, ages, back-off and bills: the start of the caller's statement. Tests set `windlass.now` on
-- their connection to run a real PostgreSQL in virtual time.
create function windlass.now() returns timestamptz
language sql stable parallel safe
as $$
  select coalesce(
    nullif(current_setting('windlass.now', true), '')::timestamptz,
    statement_timestamp()
  )
$$;

-- Whether a text is a valid name of a queue, fleet or token: short enough for a label, safe in a channel, a path and a
-- metric. The length is not part of the regular expression: that would be five times as slow for every enqueued row.
create function windlass_internal.is_name(p_name text) returns boolean
language sql immutable parallel safe
as $$ select length(p_name) <= 63 and p_name ~ '^[A-Za-z0-9][A-Za-z0-9_.:-]*$' $$;

-- The rules of a task's columns are domains and not checks. A domain is checked when its value is set; a check is
-- planned and run again by every statement that touches the row, which would take a tenth of the time of a claim.
create domain windlass.name as text check (windlass_internal.is_name(value));
create domain windlass.task_status as text check (value in ('queued', 'running', 'complete', 'error', 'failed'));
create domain windlass.task_key as text check (length(value) between 1 and 200);
create domain windlass.attempt_limit as integer check (value >= 1);
-- At most ten years, like every duration of the configuration.
create domain windlass.time_limit_s as double precision check (value > 0 and value <= 315360000);
-- A code for programs, such as HANDLER_ERROR. Workers choose it.
create domain windlass.error_code as text check (length(value) <= 100 and value !~ '[[:cntrl:]]');
-- Who enqueued a task: an actor (model/actor.py), or an end user as an adopted table names it.
create domain windlass.task_owner as text check (length(value) <= 1000);
create domain windlass.progress_note as text check (length(value) <= 500);
-- The range that every client's calendar can represent in every time zone. A client could not read any list that
-- contains a time outside it.
create domain windlass.due_time as timestamptz
  check (value >= '0002-01-01 00:00+00' and value < '9999-01-01 00:00+00');

-- What a worker reports with its heartbeats. Every list of workers reads it, and every dashboard shows it. Clients
-- refuse JSON that is nested too deeply, so one such value would make every list unreadable.
create domain windlass.worker_metadata as jsonb
  check (jsonb_typeof(value) = 'object' and octet_length(value::text) <= 4096 and not value @? '$.**{21}');

-- Identifies this database independently of the address it is reached by. Machines are tagged with it.
create table windlass.instance (
  id uuid not null default gen_random_uuid(),
  is_only boolean primary key default true check (is_only)
);
insert into windlass.instance default values;

create function windlass_internal.instance_id() returns uuid
language sql stable
as $$ select id from windlass.instance $$;
