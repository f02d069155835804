-- Who may call over HTTP: machines that join, the workers they become, and people with API tokens.
--
-- Only hashes (SHA-256) are kept. Tokens are 256 random bits, so a hash need not be slow to compute to be safe.

alter table windlass.workers
  -- What its machine exchanged its join token for. Worth something until the worker is terminated: its status is looked at, always.
  add column token_hash bytea,
  add column joined_at timestamptz;

create unique index workers_join_token on windlass.workers (join_token_hash) where join_token_hash is not null;
create unique index workers_token on windlass.workers (token_hash) where token_hash is not null;

create table windlass.tokens (
  id bigint generated always as identity primary key,
  name windlass.name not null,
  role text not null check (role in ('viewer', 'producer', 'operator', 'worker')),
  hash bytea not null unique,
  created_at timestamptz not null default windlass.now(),
  last_used_at timestamptz,
  revoked_at timestamptz
);
create unique index tokens_name on windlass.tokens (name) where revoked_at is null;

-- Who let a worker in that nobody hired. It is over when this token is revoked.
alter table windlass.workers add column registered_by bigint references windlass.tokens (id);


-- Whose token this is: one row, or none for a token that is nobody's or revoked. Each kind is one probe of an index,
-- and workers, who call all day, come first.
create function windlass_internal.authenticate(p_token_hash bytea) returns table (
  kind text,
  name text,
  fleet text,
  queues text[],
  has_ended boolean,
  is_expired boolean,
  role text
)
language plpgsql
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
  v_now timestamptz := windlass.now();
begin
  return query
    select 'worker', w.id, w.fleet, w.queues, w.status = 'terminated' or t.revoked_at is not null, false, null::text
    from windlass.workers w
    left join windlass.tokens t on t.id = w.registered_by
    where w.token_hash = p_token_hash;
  if found then
    return;
  end if;

  return query
    select 'join', w.id, w.fleet, w.queues, w.status not in ('spawning', 'active', 'terminating'),
      w.join_expires_at <= v_now, null::text
    from windlass.workers w
    where w.join_token_hash = p_token_hash;
  if found then
    return;
  end if;

  return query
    select 'token', t.name::text, null::text, null::text[], false, false, t.role
    from windlass.tokens t
    where t.hash = p_token_hash
      and t.revoked_at is null;
  if found then
    -- To the minute: reading must not become writing.
    update windlass.tokens
    set last_used_at = v_now
    where hash = p_token_hash
      and (last_used_at is null or last_used_at < v_now - interval '1 minute');
  end if;
end
$$;

-- A machine exchanges the join token it was made with for a worker token of its own making. Returns 'activated', also
-- when the same two come again: the first answer may have been lost. Otherwise nothing has changed, and it returns why:
-- 'unknown' (no such worker, or not its join token), 'ended', 'used' (for another worker token), 'expired'. The worker's
-- status stays: its first heartbeat says that it works.
create function windlass_internal.exchange_join_token(p_worker_id text, p_join_token_hash bytea, p_token_hash bytea) returns text
language plpgsql
as $$
declare
  v_worker windlass.workers;
begin
  select * into v_worker
  from windlass.workers w
  where w.id = p_worker_id
    and w.join_token_hash = p_join_token_hash
  for no key update;
  if not found then
    return 'unknown';
  end if;
  if v_worker.status not in ('spawning', 'active', 'terminating') then
    return 'ended';
  end if;
  if v_worker.token_hash is not null then
    return case when v_worker.token_hash = p_token_hash then 'activated' else 'used' end;
  end if;
  if v_worker.join_expires_at <= windlass.now() then
    return 'expired';
  end if;
  update windlass.workers set token_hash = p_token_hash, joined_at = windlass.now() where id = p_worker_id;
  perform windlass_internal.add_event('WORKER_JOINED', 'its machine exchanged its join token', v_worker.fleet, p_worker_id, null);
  return 'activated';
end
$$;

-- A machine that has joined cannot start its worker, and says why. The control loop fails it with this code. Whoever has
-- been heard of works, whatever was said before; repeating it changes nothing.
create function windlass_internal.report_start_failure(p_worker_id text, p_code text, p_reason text) returns void
language plpgsql
as $$
declare
  v_fleet text;
begin
  update windlass.workers
  set prepare_code = p_code, prepare_reason = p_reason
  where id = p_worker_id
    and status = 'spawning'
    and slot is not null
    and prepare_code is null
    and last_heartbeat is null
  returning fleet into v_fleet;
  if found then
    perform windlass_internal.add_event('WORKER_NOT_STARTED', p_reason, v_fleet, p_worker_id, null, jsonb_build_object('code', p_code));
  end if;
end
$$;

-- A worker that nobody hired registers with an API token of role worker and a worker token of its own making. Returns its
-- status, also when the same two come again; null if the API token is not in use or of another role; 'taken' if the name
-- is another's, whoever that is.
create function windlass_internal.self_register_worker(
  p_api_token_hash bytea,
  p_token_hash bytea,
  p_worker_id text,
  p_fleet text,
  p_queues text[],
  p_concurrency integer,
  p_lease_s double precision,
  p_host text,
  p_pid integer,
  p_version text,
  p_start_id text
) returns text
language plpgsql
as $$
declare
  v_token_id bigint;
  v_status text;
begin
  -- Shared: a revocation waits for us, and then counts for this worker too.
  select t.id into v_token_id
  from windlass.tokens t
  where t.hash = p_api_token_hash
    and t.role = 'worker'
    and t.revoked_at is null
  for share;
  if not found then
    return null;
  end if;
  if exists (select from windlass.workers w where w.id = p_worker_id and w.token_hash is distinct from p_token_hash) then
    return 'taken';
  end if;
  v_status := windlass.register_worker(
    p_worker_id, p_fleet, p_queues, p_concurrency, p_lease_s, p_host, p_pid, p_version, 'worker', p_start_id
  );
  update windlass.workers
  set token_hash = p_token_hash, joined_at = windlass.now(), registered_by = v_token_id
  where id = p_worker_id
    and token_hash is null;
  return v_status;
end
$$;
