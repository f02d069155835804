-- Workers: register, activate, deregister. Heartbeats: 05_heartbeats.sql.

create function windlass_internal.check_worker_transition() returns trigger
language plpgsql
as $$
begin
  if (old.status, new.status) not in (
    ('spawning', 'active'), ('spawning', 'terminating'), ('spawning', 'error'), ('spawning', 'terminated'),
    ('active', 'terminating'), ('active', 'error'), ('active', 'terminated'),
    ('terminating', 'error'), ('terminating', 'terminated'),
    ('error', 'terminated')
  ) then
    raise exception 'worker % cannot change from % to %', old.id, old.status, new.status
      using errcode = 'check_violation';
  end if;
  return new;
end
$$;

create trigger check_worker_transition
  before update of status on windlass.workers
  for each row
  when (old.status is distinct from new.status)
  execute function windlass_internal.check_worker_transition();

-- Raise for a registration that no list could show. The columns have no checks of their own: those would be planned and
-- run by every heartbeat.
create function windlass_internal.check_registration(
  p_worker_id text, p_queues text[], p_host text, p_version text, p_start_id text, p_secret text
) returns void
language plpgsql
as $$
declare
  v_queue text;
begin
  -- Ids are printed in logs and lists.
  if p_worker_id is null or length(p_worker_id) not between 1 and 200 or p_worker_id ~ '[[:cntrl:]]' then
    raise exception 'a worker id has 1 to 200 characters, without control characters'
      using errcode = 'invalid_parameter_value';
  end if;
  if length(p_host) > 255 or length(p_version) > 100 or length(p_start_id) > 100
    or concat(p_host, p_version, p_start_id) ~ '[[:cntrl:]]'
  then
    raise exception 'host has at most 255 characters, version and start_id at most 100, without control characters'
      using errcode = 'invalid_parameter_value';
  end if;
  if length(p_secret) not between 32 and 200 then
    raise exception 'the secret of a worker has 32 to 200 characters' using errcode = 'invalid_parameter_value';
  end if;
  if cardinality(p_queues) > 1000 then
    raise exception 'a worker serves at most 1000 queues, not %', cardinality(p_queues)
      using errcode = 'program_limit_exceeded';
  end if;
  select q into v_queue from unnest(p_queues) as q where windlass_internal.is_name(q) is not true limit 1;
  if found then
    raise exception '% is not the name of a queue', quote_nullable(left(v_queue, 80))
      using errcode = 'invalid_parameter_value';
  end if;
end
$$;

-- A worker registers itself, with a secret of at least 32 characters that it generated. Every later call names the
-- secret. A spawned worker finds its row and keeps fleet, slot, status, lease, concurrency, kind and queues: they are
-- those of its order, and so is its secret. A worker started by hand gets a row without a slot and is active at once. A
-- terminated id stays terminated. Returns the status.
--
-- A caller that is not trusted (03_callers.sql) needs a secret, registers workers of kind `worker` only, and in fleets
-- that exist. Another secret takes over the id of a worker started by hand once its lease has expired.
--
-- A program that restarted under the same id (a service, a container) holds no task: what its previous start had
-- claimed is requeued, and the attempt counts, because it may have killed the program. The same p_start_id means the
-- same start whose call was late or repeated. Without p_start_id every call is a new start.
create function windlass.register_worker(
  p_worker_id text,
  p_fleet text default 'default',
  p_queues text[] default '{}',
  p_concurrency integer default 1,
  p_lease_s double precision default 30,
  p_host text default null,
  p_pid integer default null,
  p_version text default null,
  p_kind text default 'worker',
  p_start_id text default null,
  p_secret text default null
) returns text
language plpgsql
as $$
declare
  v_is_trusted boolean := windlass_internal.is_trusted();
  v_secret_hash bytea := sha256(convert_to(p_secret, 'UTF8'));
  v_before windlass.workers;
  v_worker windlass.workers;
  -- Null for an unknown id: then there are no tasks to requeue.
  v_is_new_start boolean;
begin
  perform windlass_internal.check_settings();
  perform windlass_internal.check_registration(p_worker_id, p_queues, p_host, p_version, p_start_id, p_secret);
  if not v_is_trusted and p_secret is null then
    raise exception 'worker % needs a secret: pass p_secret', p_worker_id using errcode = 'insufficient_privilege';
  end if;

  select w.* into v_before from windlass.workers w
  where w.id = p_worker_id
  for no key update;
  if found then
    v_is_new_start := (v_before.start_id = p_start_id) is not true;
    if not v_is_trusted and v_before.secret_hash is distinct from v_secret_hash
      and v_before.status in ('spawning', 'active', 'terminating')
      and (
        v_before.slot is not null
        or v_before.kind <> 'worker'
        or v_before.token_hash is not null -- of a worker over HTTP
        or coalesce(v_before.last_heartbeat, v_before.created_at)
          >= windlass.now() - make_interval(secs => v_before.lease_s)
      )
    then
      raise exception 'the id % belongs to another worker: choose another, or pass its secret', p_worker_id
        using errcode = 'invalid_parameter_value';
    end if;
  elsif not v_is_trusted then
    if p_kind is distinct from 'worker' then
      raise exception 'only the control plane registers a %', p_kind using errcode = 'insufficient_privilege';
    end if;
    if p_fleet is distinct from 'default' and not exists (select from windlass.fleets f where f.name = p_fleet) then
      raise exception 'fleet % not found: register in a fleet that exists', p_fleet
        using errcode = 'invalid_parameter_value';
    end if;
  end if;

  -- A known worker keeps its fleet, so another name must not create one.
  if v_is_trusted or (p_fleet = 'default' and v_before.id is null) then
    insert into windlass.fleets (name) values (p_fleet) on conflict do nothing;
  end if;

  insert into windlass.workers as w (
    id, fleet, status, paused, queues, kind, concurrency, lease_s, activated_at, host, pid, version, start_id,
    secret_hash
  )
  select p_worker_id, p_fleet, 'active', f.paused, p_queues, p_kind, p_concurrency, p_lease_s, windlass.now(), p_host,
    p_pid, p_version, p_start_id, v_secret_hash
  from windlass.fleets f where f.name = coalesce(v_before.fleet, p_fleet)
  on conflict (id) do update
    set queues = case when w.slot is null then excluded.queues else w.queues end,
        concurrency = case when w.slot is null then excluded.concurrency else w.concurrency end,
        lease_s = case when w.slot is null then excluded.lease_s else w.lease_s end,
        host = excluded.host, pid = excluded.pid, version = excluded.version, start_id = excluded.start_id,
        secret_hash = coalesce(excluded.secret_hash, w.secret_hash)
    where w.status in ('spawning', 'active', 'terminating')
      -- Another caller may have inserted the row since it was searched.
      and (v_is_trusted or w.secret_hash is not distinct from v_secret_hash or w.id = v_before.id)
  returning w.* into v_worker;

  if v_worker.id is null then
    return (select w.status from windlass.workers w where w.id = p_worker_id);
  end if;
  perform windlass_internal.add_event(
    'WORKER_REGISTERED',
    format('registered on %s, serving %s', coalesce(p_host, 'an unknown host'),
      array_to_string(v_worker.queues, ', ')),
    v_worker.fleet, p_worker_id, null);
  -- Tasks on nodes outlive a restart of the dispatcher or of the node's own program.
  if v_worker.kind = 'worker' and v_is_new_start then
    perform windlass_internal.requeue_tasks_of(array[p_worker_id], 'WORKER_LOST', 'its worker restarted');
  end if;
  return v_worker.status;
end
$$;

-- Lock workers in the order of their ids, before a transaction writes several of them in any order.
create function windlass_internal.lock_workers(p_worker_ids text[]) returns void
language plpgsql
as $$
begin
  perform from windlass.workers w
  where w.id = any (p_worker_ids)
  order by w.id for no key update;
end
$$;

-- Make a spawning worker active.
create function windlass_internal.promote_worker(p_worker_id text, p_reason text) returns void
language plpgsql
as $$
declare
  v_fleet text;
begin
  update windlass.workers set status = 'active', activated_at = windlass.now()
  where id = p_worker_id and status = 'spawning'
  returning fleet into v_fleet;
  if found then
    perform windlass_internal.add_event('WORKER_ACTIVATED', p_reason, v_fleet, p_worker_id, null);
  end if;
end
$$;

-- A spawning worker reports that it is ready. Returns its status.
create function windlass.activate_worker(p_worker_id text, p_secret text default null) returns text
language plpgsql
as $$
begin
  perform windlass_internal.check_worker(p_worker_id, p_secret);
  perform windlass_internal.promote_worker(p_worker_id, 'worker reported ready');
  return (select w.status from windlass.workers w where w.id = p_worker_id);
end
$$;


-- A worker stops. One started by hand is terminated. A spawned one still has a machine: it becomes terminating, and the
-- control plane deletes its machine. Its tasks return to the queue.
--
-- Locked tasks are skipped: the transaction that holds one may need the worker's row next, which this call holds.
-- recover_lost_workers, or the deletion of the machine, requeues them.
create function windlass.deregister_worker(
  p_worker_id text, p_reason text default 'deregistered', p_secret text default null
) returns void
language plpgsql
as $$
declare
  v_now timestamptz := windlass.now();
  v_worker windlass.workers;
begin
  perform windlass_internal.check_worker(p_worker_id, p_secret);
  update windlass.workers
  set status = case when slot is null then 'terminated' else 'terminating' end,
      terminated_at = case when slot is null then v_now end,
      terminating_at = coalesce(terminating_at, v_now),
      code = coalesce(code, 'DEREGISTERED'), reason = coalesce(reason, windlass_internal.printable(left(p_reason, 8000)))
  where id = p_worker_id and status in ('spawning', 'active', 'terminating')
  returning * into v_worker;
  if found then
    perform windlass_internal.add_event('WORKER_DEREGISTERED', p_reason, v_worker.fleet, p_worker_id, null);
    perform windlass_internal.release_claim(p_worker_id, t.id, t.claim_token, 'its worker deregistered')
    from (
      select r.id, r.claim_token from windlass.tasks r
      where r.worker_id = p_worker_id and r.status = 'running'
      order by r.id for no key update skip locked
    ) as t;
  end if;
end
$$;
