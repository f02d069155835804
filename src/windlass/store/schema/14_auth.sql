-- HTTP callers: machines that join, the workers they become, and people and programs with API tokens.

-- Authenticate a token: one row, or none if the token is unknown or revoked. Each kind of token costs one index probe;
-- worker tokens come first because workers call all day.
create function windlass_internal.authenticate(p_token_hash bytea) returns table (
  kind text,
  name text,
  fleet text,
  queues text[],
  has_terminated boolean,
  is_expired boolean,
  role text,
  fleets text[],
  valid_for_s double precision,
  token_id bigint
)
language plpgsql
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
  v_now timestamptz := windlass.now();
begin
  return query
    select 'worker', w.id, w.fleet, w.queues,
      w.status not in ('spawning', 'active', 'terminating') or t.revoked_at is not null
        or coalesce(t.expires_at <= v_now, false),
      false, null::text, null::text[], extract(epoch from t.expires_at - v_now)::float8, null::bigint
    from windlass.workers w
    left join windlass.tokens t on t.id = w.registered_by
    where w.token_hash = p_token_hash;
  if found then
    return;
  end if;

  return query
    select 'join', w.id, w.fleet, w.queues, w.status not in ('spawning', 'active', 'terminating'),
      w.join_expires_at <= v_now, null::text, null::text[], null::float8, null::bigint
    from windlass.workers w where w.join_token_hash = p_token_hash;
  if found then
    return;
  end if;

  return query
    select 'token', t.name::text, null::text, t.queues, false, false, t.role, t.fleets,
      extract(epoch from t.expires_at - v_now)::float8, t.id
    from windlass.tokens t
    where t.hash = p_token_hash
      and t.revoked_at is null
      and (t.expires_at is null or t.expires_at > v_now);
  if found then
    -- At most one write per minute: authentication should stay a read.
    update windlass.tokens set last_used_at = v_now
    where hash = p_token_hash
      and (last_used_at is null or last_used_at < v_now - interval '1 minute');
  end if;
end
$$;

-- A machine exchanges its join token for a worker token that it generated itself. Returns 'activated', also for a
-- repeated call with the same two tokens: the first answer may have been lost. Otherwise nothing has changed, and it
-- returns 'unknown' (no such worker, or not its join token), 'ended', 'used' (for another worker token) or 'expired'.
-- The worker's status stays: its first heartbeat proves that it runs.
create function windlass_internal.exchange_join_token(p_worker_id text, p_join_token_hash bytea, p_token_hash bytea)
returns text
language plpgsql
as $$
declare
  v_worker windlass.workers;
begin
  select * into v_worker from windlass.workers w
  where w.id = p_worker_id and w.join_token_hash = p_join_token_hash
  for no key update;
  if not found then
    return 'unknown';
  end if;
  -- A machine in the wrong place is about to be deleted: it must get no task.
  if v_worker.status not in ('spawning', 'active', 'terminating') or v_worker.prepare_code = 'MISPLACED' then
    return 'ended';
  end if;
  if v_worker.token_hash is not null then
    return case when v_worker.token_hash = p_token_hash then 'activated' else 'used' end;
  end if;
  if v_worker.join_expires_at <= windlass.now() then
    return 'expired';
  end if;
  update windlass.workers
  set token_hash = p_token_hash, joined_at = windlass.now(), reachable_at = coalesce(reachable_at, windlass.now())
  where id = p_worker_id;
  perform windlass_internal.add_event('WORKER_JOINED', 'machine exchanged its join token', v_worker.fleet, p_worker_id,
    null);
  return 'activated';
end
$$;

-- A machine that has not joined yet reports the step of its boot. It proves that the machine makes progress, so its
-- spawn timeout begins again. `p_output`: the last lines that its boot printed. Without effect after the first
-- heartbeat.
create function windlass_internal.report_boot_step(
  p_worker_id text, p_step text, p_output text default null
) returns void
language plpgsql
as $$
begin
  update windlass.workers
  set boot_step = p_step, boot_step_at = windlass.now(), reachable_at = coalesce(reachable_at, windlass.now()),
      boot_steps = case
        when boot_step is distinct from p_step and jsonb_array_length(boot_steps) < 40
        then boot_steps || jsonb_build_object('step', p_step, 'at', windlass.now())
        else boot_steps
      end
  where id = p_worker_id and status = 'spawning' and slot is not null and last_heartbeat is null;
  if found then
    perform windlass_internal.record_boot_log(p_worker_id, p_output);
  end if;
end
$$;

-- A joined machine cannot start its worker. The control plane fails the worker with this code. Without effect after the
-- first heartbeat, or if a failure was reported before.
create function windlass_internal.report_start_failure(p_worker_id text, p_code text, p_reason text) returns void
language plpgsql
as $$
declare
  v_fleet text;
begin
  update windlass.workers set prepare_code = p_code, prepare_reason = p_reason
  where id = p_worker_id and status = 'spawning' and slot is not null and prepare_code is null
    and last_heartbeat is null
  returning fleet into v_fleet;
  if found then
    perform windlass_internal.add_event('WORKER_NOT_STARTED', p_reason, v_fleet, p_worker_id, null,
      jsonb_build_object('code', p_code));
  end if;
end
$$;

-- A worker that no fleet spawned registers with an API token of role worker and a worker token that it generated
-- itself. Returns its status, also for a repeated call with the same two tokens; null if the API token is revoked,
-- expired, unknown or of another role; 'taken' if the worker id belongs to another worker token.
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
  -- A concurrent revocation waits for this transaction, and then applies to this worker too.
  select t.id into v_token_id from windlass.tokens t
  where t.hash = p_api_token_hash and t.role = 'worker' and t.revoked_at is null
    and (t.expires_at is null or t.expires_at > windlass.now())
  for share;
  if not found then
    return null;
  end if;
  -- Of two calls for one new id, the second sees the row of the first.
  perform pg_advisory_xact_lock(hashtext('windlass.self_register_worker'), hashtext(p_worker_id));
  if exists (
    select from windlass.workers w where w.id = p_worker_id and w.token_hash is distinct from p_token_hash
  ) then
    return 'taken';
  end if;
  v_status := windlass.register_worker(
    p_worker_id, p_fleet, p_queues, p_concurrency, p_lease_s, p_host, p_pid, p_version, 'worker', p_start_id
  );
  update windlass.workers
  set token_hash = p_token_hash, joined_at = windlass.now(), registered_by = v_token_id
  where id = p_worker_id and token_hash is null;
  return v_status;
end
$$;

-- Servers cache callers, and listen on channel windlass_identities to forget one at once. The payload is the hash of
-- its token or session in hexadecimal; empty if any caller may have changed.

create function windlass_internal.notify_worker_identity() returns trigger
language plpgsql
as $$
begin
  perform pg_notify('windlass_identities', encode(old.token_hash, 'hex'));
  return null;
end
$$;

-- Heartbeats set none of these columns, so they do not pay for this trigger.
create trigger notify_worker_identity
  after update of status, queues, fleet, token_hash on windlass.workers
  for each row
  when (
    old.token_hash is not null
    and (
      new.status in ('error', 'terminated') and old.status not in ('error', 'terminated')
      or new.queues <> old.queues
      or new.fleet <> old.fleet
      or new.token_hash is distinct from old.token_hash
    )
  )
  execute function windlass_internal.notify_worker_identity();

create trigger notify_deleted_worker_identity
  after delete on windlass.workers
  for each row
  when (old.token_hash is not null and old.status not in ('error', 'terminated'))
  execute function windlass_internal.notify_worker_identity();

-- The first token closes the server to requests without one. The identities of workers end with the token that
-- registered them.
create function windlass_internal.notify_token_identity() returns trigger
language plpgsql
as $$
begin
  perform pg_notify('windlass_identities', encode(coalesce(old.hash, new.hash), 'hex'));
  if old.role = 'worker' then
    perform pg_notify('windlass_identities', encode(w.token_hash, 'hex'))
    from windlass.workers w
    where w.registered_by = old.id and w.token_hash is not null;
  end if;
  return null;
end
$$;

create trigger notify_token_identity
  after insert or delete or update of name, role, hash, queues, fleets, expires_at, revoked_at on windlass.tokens
  for each row
  execute function windlass_internal.notify_token_identity();

create function windlass_internal.notify_session_identity() returns trigger
language plpgsql
as $$
begin
  perform pg_notify('windlass_identities', encode(old.hash, 'hex'));
  return null;
end
$$;

create trigger notify_session_identity
  after delete or update on windlass.sessions
  for each row
  when (not old.is_link)
  execute function windlass_internal.notify_session_identity();

-- The rates of callers that use a good part of their limit, by server process. Unlogged: after a crash it is empty,
-- and filled again within a second.
create unlogged table windlass.caller_rates (
  server_id uuid not null,
  kind text not null,
  caller text not null,
  rate double precision not null,
  recorded_at timestamptz not null,
  primary key (server_id, kind, caller)
);

-- Replace the rates of a server and return the sums over all servers for the same callers. Each server calls it about
-- once a second while it has such callers, with a bounded number of them.
create function windlass_internal.share_rates(
  p_server_id uuid,
  p_kinds text[],
  p_callers text[],
  p_rates double precision[],
  p_ttl_s double precision
) returns table (kind text, caller text, rate double precision)
language plpgsql
as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
begin
  delete from windlass.caller_rates r
  where r.server_id = p_server_id
    or r.recorded_at < v_now - 10 * make_interval(secs => p_ttl_s);
  insert into windlass.caller_rates (server_id, kind, caller, rate, recorded_at)
  select p_server_id, u.kind, u.caller, u.rate, v_now
  from unnest(p_kinds, p_callers, p_rates) as u (kind, caller, rate);
  return query
    select r.kind, r.caller, sum(r.rate)
    from windlass.caller_rates r
    join unnest(p_kinds, p_callers) as u (kind, caller) on u.kind = r.kind and u.caller = r.caller
    where r.recorded_at > v_now - make_interval(secs => p_ttl_s)
    group by r.kind, r.caller;
end
$$;
