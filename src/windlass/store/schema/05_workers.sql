-- Workers: register, activate, heartbeat, deregister.

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

-- A worker registers itself. A spawned worker finds its row and keeps fleet, slot and status. A worker started by hand
-- gets a row without a slot and is active at once. An id that has ended stays ended. Returns the status.
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
  p_start_id text default null
) returns text
language plpgsql
as $$
declare
  v_status text;
  v_fleet text;
  -- Null for an unknown id: then there are no tasks to requeue.
  v_is_new_start boolean;
begin
  select (w.start_id = p_start_id) is not true into v_is_new_start from windlass.workers w
  where w.id = p_worker_id
  for no key update;

  insert into windlass.fleets (name) values (p_fleet) on conflict do nothing;

  insert into windlass.workers as w (
    id, fleet, status, paused, queues, kind, concurrency, lease_s, activated_at, host, pid, version, start_id
  )
  select p_worker_id, p_fleet, 'active', f.paused, p_queues, p_kind, p_concurrency, p_lease_s, windlass.now(), p_host,
    p_pid, p_version, p_start_id
  from windlass.fleets f where f.name = p_fleet
  on conflict (id) do update
    set queues = excluded.queues, kind = excluded.kind, concurrency = excluded.concurrency, lease_s = excluded.lease_s,
        host = excluded.host, pid = excluded.pid, version = excluded.version, start_id = excluded.start_id
    where w.status in ('spawning', 'active', 'terminating')
  returning w.status, w.fleet into v_status, v_fleet;

  if v_status is null then
    select w.status into v_status from windlass.workers w where w.id = p_worker_id;
  else
    perform windlass_internal.add_event(
      'WORKER_REGISTERED',
      format('registered on %s, serving %s', coalesce(p_host, 'an unknown host'), array_to_string(p_queues, ', ')),
      v_fleet, p_worker_id, null);
    -- Tasks on nodes outlive a restart of the dispatcher or of the node's own program.
    if p_kind = 'worker' and v_is_new_start then
      perform windlass_internal.requeue_tasks_of(array[p_worker_id], 'WORKER_LOST', 'its worker restarted');
    end if;
  end if;
  return v_status;
end
$$;

-- A spawning worker reports that it is ready. Returns its status.
create function windlass.activate_worker(p_worker_id text) returns text
language plpgsql
as $$
declare
  v_worker windlass.workers;
begin
  update windlass.workers set status = 'active', activated_at = windlass.now()
  where id = p_worker_id and status = 'spawning'
  returning * into v_worker;
  if found then
    perform windlass_internal.add_event('WORKER_ACTIVATED', 'worker reported ready', v_worker.fleet, p_worker_id, null);
    return 'active';
  end if;
  return (select w.status from windlass.workers w where w.id = p_worker_id);
end
$$;

-- The longest gap between heartbeats that is normal for this lease: a worker sends three per lease, and one may be
-- late. An outage that fits into it is so short that all workers with that lease are back before their lease expires.
create function windlass_internal.max_heartbeat_gap_s(p_lease_s double precision) returns double precision
language sql immutable parallel safe
as $$ select 0.4 * p_lease_s $$;

-- Heartbeats of several workers, each named once, in one statement of the HTTP server; and `heartbeat` for one. The
-- arrays from p_holder_ids on belong together: the claims that these workers hold. Returns a row per worker: its status
-- ('unknown' without a row), whether it is paused, and the tokens of claims it has lost.
--
-- The status is null if another transaction has locked the worker's row. Then nothing was recorded for it: one locked
-- row must not delay the others. Call `heartbeat` for that worker, which waits.
create function windlass_internal.record_heartbeats(
  p_worker_ids text[],
  p_vitals jsonb[],
  p_holder_ids text[],
  p_task_ids bigint[],
  p_tokens uuid[],
  p_progress real[],
  p_notes text[]
) returns table (worker_id text, status text, paused boolean, lost uuid[])
language plpgsql
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
  v_now timestamptz := windlass.now();
  v_ids text[];
  v_statuses text[];
  v_paused boolean[];
  v_leases interval[];
  v_kinds text[];
begin
  with locked as materialized (
    select l.id, g.vitals, l.metadata || (g.vitals - '{pid,vram_total_mb,vram_used_mb}'::text[]) as metadata
    from unnest(p_worker_ids, p_vitals) as g (id, vitals)
    cross join lateral (
      select w.id, w.metadata from windlass.workers w
      where w.id = g.id and w.status in ('spawning', 'active', 'terminating')
      for no key update skip locked
    ) as l
  ),
  recorded as (
    update windlass.workers w
    set last_heartbeat = v_now,
        heartbeat_gapless_since = case
          when w.last_heartbeat is null
            or v_now - w.last_heartbeat > make_interval(secs => windlass_internal.max_heartbeat_gap_s(w.lease_s))
          then v_now
          else w.heartbeat_gapless_since
        end,
        pid = coalesce((l.vitals ->> 'pid')::integer, w.pid),
        vram_total_mb = coalesce((l.vitals ->> 'vram_total_mb')::integer, w.vram_total_mb),
        vram_used_mb = coalesce((l.vitals ->> 'vram_used_mb')::integer, w.vram_used_mb),
        vram_at = case when l.vitals ? 'vram_total_mb' then v_now else w.vram_at end,
        vram_lost_at = case
          when (l.vitals ->> 'vram_total_mb')::integer > 0 then null
          when (l.vitals ->> 'vram_total_mb')::integer = 0 and w.vram_total_mb > 0 then v_now
          else w.vram_lost_at
        end,
        -- A worker that reports under ever new names keeps its last report only.
        metadata = case
          when octet_length(l.metadata::text) <= 4096 then l.metadata
          else l.vitals - '{pid,vram_total_mb,vram_used_mb}'::text[]
        end
    from locked l
    where w.id = l.id
    returning w.id, w.status, w.paused, make_interval(secs => w.lease_s) as lease, w.kind
  )
  select coalesce(array_agg(r.id), '{}'), array_agg(r.status), array_agg(r.paused), array_agg(r.lease),
    array_agg(r.kind)
  into v_ids, v_statuses, v_paused, v_leases, v_kinds
  from recorded r;

  -- Some have ended, are unknown or locked. All claims of ended and unknown workers are lost.
  if cardinality(v_ids) < cardinality(p_worker_ids) then
    return query
    select o.id,
      case when w.status in ('spawning', 'active', 'terminating') then null else coalesce(w.status, 'unknown') end,
      false,
      array(select h.token from unnest(p_holder_ids, p_tokens) as h (holder_id, token) where h.holder_id = o.id)
    from unnest(p_worker_ids) as o (id)
    left join windlass.workers w on w.id = o.id
    where o.id <> all (v_ids);

    select coalesce(array_agg(h.holder_id), '{}'), array_agg(h.task_id), array_agg(h.token), array_agg(h.progress),
      array_agg(h.note)
    into p_holder_ids, p_task_ids, p_tokens, p_progress, p_notes
    from unnest(p_holder_ids, p_task_ids, p_tokens, p_progress, p_notes) as h (
      holder_id, task_id, token, progress, note
    )
    where h.holder_id = any (v_ids);
  end if;

  if cardinality(p_holder_ids) = 0 then
    return query
    select r.id, r.status, r.paused, '{}'::uuid[] from unnest(v_ids, v_statuses, v_paused) as r (id, status, paused);
  else
    return query
    select r.id, max(r.status), bool_or(r.paused), coalesce(array_agg(r.token) filter (where r.token is not null), '{}')
    from (
      select k.id, k.status, k.paused, null::uuid as token
      from unnest(v_ids, v_statuses, v_paused) as k (id, status, paused)
      union all
      select h.holder_id, null, null, h.token
      from unnest(p_holder_ids, p_task_ids, p_tokens) as h (holder_id, task_id, token)
      where not exists (
        select from windlass.tasks t
        where t.id = h.task_id and t.claim_token = h.token and t.finished_at is null
          and (t.worker_id = h.holder_id or windlass_internal.acts_for(h.holder_id, t.worker_id))
      )
    ) as r
    group by r.id;

    -- A locked task is being finished or requeued right now. Waiting for it would delay these heartbeats, and could
    -- deadlock: the holder of the task may need the worker's row, which this call holds.
    update windlass.tasks t set progress = changed.progress, progress_note = changed.note
    from (
      select r.id, h.progress, h.note
      from unnest(p_holder_ids, p_task_ids, p_tokens, p_progress, p_notes) as h (
        holder_id, task_id, token, progress, note
      )
      join windlass.tasks r on r.id = h.task_id and r.claim_token = h.token and r.finished_at is null
      where (r.worker_id = h.holder_id or windlass_internal.acts_for(h.holder_id, r.worker_id))
        and h.progress is not null and (r.progress, r.progress_note) is distinct from (h.progress, h.note)
      for no key update of r skip locked
    ) as changed
    where t.id = changed.id;
  end if;

  -- Release claims that their worker does not name: the answer to its claim was lost. After a lease no worker still
  -- waits for that answer, and without this the task would stay running forever. The dispatcher's heartbeat names the
  -- claims of tasks on nodes.
  perform windlass.release_task(t.worker_id, t.id, t.claim_token, 'the claim did not reach its worker')
  from (
    select r.id, r.claim_token, r.worker_id
    from (
      select o.id, o.claim_token
      from unnest(v_ids, v_leases, v_kinds) as k (id, lease, kind)
      -- `offset 0` keeps the planner from reading all running tasks first.
      cross join lateral (
        select s.id, s.claim_token from windlass.tasks s
        where s.worker_id = k.id and s.status = 'running' and s.started_at < v_now - k.lease
        offset 0
      ) as o
      where k.kind <> 'node'
      except
      select h.task_id, h.token from unnest(p_task_ids, p_tokens) as h (task_id, token)
    ) as u
    -- Checked again on the locked row: it may have been released and claimed again meanwhile.
    join windlass.tasks r on r.id = u.id and r.claim_token = u.claim_token and r.finished_at is null
    for no key update of r skip locked
  ) as t;
end
$$;

-- A worker reports that it is alive and which claims it holds: [{"task_id", "token", "progress", "note"}]. Returns its
-- status, whether it is paused, and the tokens of claims it has lost. p_vitals: pid, vram_total_mb, vram_used_mb, and
-- anything else to store in metadata, at most 4 KiB. A worker that has ended, or is unknown, changes no row.
create function windlass.heartbeat(
  p_worker_id text,
  p_claims jsonb default '[]',
  p_vitals jsonb default '{}',
  out status text,
  out paused boolean,
  out lost uuid[]
)
language plpgsql
as $$
declare
  v_ids bigint[];
  v_tokens uuid[];
  v_progress real[];
  v_notes text[];
begin
  if jsonb_array_length(p_claims) > 10000 then
    raise exception 'a heartbeat names at most 10000 claims, not %', jsonb_array_length(p_claims)
      using errcode = 'program_limit_exceeded';
  end if;
  if octet_length(p_vitals::text) > 4096 then
    raise exception 'vitals have at most 4096 bytes, not %', octet_length(p_vitals::text)
      using errcode = 'program_limit_exceeded';
  end if;
  select array_agg((c ->> 'task_id')::bigint), array_agg((c ->> 'token')::uuid), array_agg((c ->> 'progress')::real),
    array_agg(left(c ->> 'note', 500))
  into v_ids, v_tokens, v_progress, v_notes
  from jsonb_array_elements(p_claims) as c;

  -- record_heartbeats skips a locked row.
  perform from windlass.workers w where w.id = p_worker_id for no key update;
  select h.status, h.paused, h.lost into status, paused, lost
  from windlass_internal.record_heartbeats(
    array[p_worker_id], array[p_vitals], array_fill(p_worker_id, array[coalesce(cardinality(v_ids), 0)]),
    v_ids, v_tokens, v_progress, v_notes) as h;
end
$$;

-- A worker stops. One started by hand is terminated. A spawned one still has a machine: it becomes terminating, and the
-- control plane deletes its machine. Its tasks return to the queue.
--
-- Locked tasks are skipped: the transaction that holds one may need the worker's row next, which this call holds.
-- recover_lost_workers, or the deletion of the machine, requeues them.
create function windlass.deregister_worker(p_worker_id text, p_reason text default 'deregistered') returns void
language plpgsql
as $$
declare
  v_now timestamptz := windlass.now();
  v_worker windlass.workers;
begin
  update windlass.workers
  set status = case when slot is null then 'terminated' else 'terminating' end,
      terminated_at = case when slot is null then v_now end,
      terminating_at = coalesce(terminating_at, v_now),
      code = coalesce(code, 'DEREGISTERED'), reason = coalesce(reason, p_reason)
  where id = p_worker_id and status in ('spawning', 'active', 'terminating')
  returning * into v_worker;
  if found then
    perform windlass_internal.add_event('WORKER_DEREGISTERED', p_reason, v_worker.fleet, p_worker_id, null);
    perform windlass.release_task(p_worker_id, t.id, t.claim_token, 'its worker deregistered')
    from (
      select r.id, r.claim_token from windlass.tasks r
      where r.worker_id = p_worker_id and r.status = 'running'
      order by r.id for no key update skip locked
    ) as t;
  end if;
end
$$;
