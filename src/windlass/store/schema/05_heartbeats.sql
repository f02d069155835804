-- Heartbeats of workers.

-- The longest gap between heartbeats that is normal for this lease: a worker sends three per lease, and one may be
-- late. An outage that fits into it is so short that all workers with that lease are back before their lease expires.
create function windlass_internal.max_heartbeat_gap_s(p_lease_s double precision) returns double precision
language sql immutable parallel safe
as $$ select 0.4 * p_lease_s $$;

-- Heartbeats of several workers, each named once, in one statement of the HTTP server; and `heartbeat` for one. The
-- arrays up to p_last_ids belong together: the workers, and from which task to which each names its claims. Those from
-- p_holder_ids on belong together too: the claims that these workers hold. Returns a row per worker: its status
-- ('unknown' without a row), whether it is paused, the tokens of claims it has lost, and claim_delay.
--
-- The status is null if another transaction has locked the worker's row. Then nothing was recorded for it: one locked
-- row must not delay the others. Repeat that heartbeat alone with p_waits.
--
-- Tasks are looked up by id, one per claim: `lateral` and `offset 0` keep the planner from joining. While statistics
-- know few tasks, it would read all tasks for each claim, and again for each task that changed.
create function windlass_internal.record_heartbeats(
  p_worker_ids text[],
  p_vitals jsonb[],
  p_first_ids bigint[],
  p_last_ids bigint[],
  p_holder_ids text[],
  p_task_ids bigint[],
  p_tokens uuid[],
  p_progress real[],
  p_notes text[],
  p_waits boolean default false
) returns table (worker_id text, status text, paused boolean, lost uuid[], claim_delay real)
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
  v_first_ids bigint[];
  v_last_ids bigint[];
  -- Delays of claims, null where billing periods are short.
  v_delays real[];
  v_changed_ids bigint[];
  v_changed_progress real[];
  v_changed_notes text[];
begin
  -- Before any row is locked. A heartbeat at a time that was set back would look old when the clock returns, unless the
  -- step is known.
  perform windlass_internal.follow_clock();
  if p_waits then
    perform from windlass.workers w where w.id = any (p_worker_ids) for no key update;
  end if;

  with locked as materialized (
    select l.id, g.vitals, g.first_id, g.last_id,
      l.metadata || (g.vitals - '{pid,vram_total_mb,vram_used_mb}'::text[]) as metadata
    from unnest(p_worker_ids, p_vitals, p_first_ids, p_last_ids) as g (id, vitals, first_id, last_id)
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
    returning w.id, w.status, w.paused, make_interval(secs => w.lease_s) as lease, w.kind,
      l.first_id, l.last_id,
      case when w.billing_unit_s >= 600 then windlass_internal.claim_delay(w.id, v_now) end as claim_delay
  )
  select coalesce(array_agg(r.id), '{}'), array_agg(r.status), array_agg(r.paused), array_agg(r.lease),
    array_agg(r.kind), array_agg(r.first_id), array_agg(r.last_id), array_agg(r.claim_delay)
  into v_ids, v_statuses, v_paused, v_leases, v_kinds, v_first_ids, v_last_ids, v_delays
  from recorded r;

  -- Some are terminated, unknown or locked. All claims of terminated and unknown workers are lost.
  if cardinality(v_ids) < cardinality(p_worker_ids) then
    return query
    select o.id,
      case when w.status in ('spawning', 'active', 'terminating') then null else coalesce(w.status, 'unknown') end,
      false,
      array(select h.token from unnest(p_holder_ids, p_tokens) as h (holder_id, token) where h.holder_id = o.id),
      null::real
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
    select r.id, r.status, r.paused, '{}'::uuid[], r.claim_delay
    from unnest(v_ids, v_statuses, v_paused, v_delays) as r (id, status, paused, claim_delay);
  else
    return query
    select r.id, max(r.status), bool_or(r.paused), coalesce(array_agg(r.token) filter (where r.token is not null), '{}'),
      max(r.claim_delay)
    from (
      select k.id, k.status, k.paused, null::uuid as token, k.claim_delay
      from unnest(v_ids, v_statuses, v_paused, v_delays) as k (id, status, paused, claim_delay)
      union all
      select h.holder_id, null, null, h.token, null
      from unnest(p_holder_ids, p_task_ids, p_tokens) as h (holder_id, task_id, token)
      where not exists (
        select from windlass.tasks t
        where t.id = h.task_id and t.claim_token = h.token and t.finished_at is null
          and (t.worker_id = h.holder_id or windlass_internal.acts_for(h.holder_id, t.worker_id))
        offset 0
      )
    ) as r
    group by r.id;

    -- A locked task is being finished or requeued right now. Waiting for it would delay these heartbeats, and could
    -- deadlock: the holder of the task may need the worker's row, which this call holds.
    select array_agg(r.id), array_agg(h.progress), array_agg(left(h.note, 500))
    into v_changed_ids, v_changed_progress, v_changed_notes
    from unnest(p_holder_ids, p_task_ids, p_tokens, p_progress, p_notes) as h (
      holder_id, task_id, token, progress, note
    )
    cross join lateral (
      select t.id from windlass.tasks t
      where t.id = h.task_id and t.claim_token = h.token and t.finished_at is null
        and (t.worker_id = h.holder_id or windlass_internal.acts_for(h.holder_id, t.worker_id))
        and (t.progress, t.progress_note) is distinct from (h.progress, left(h.note, 500))
      for no key update skip locked
    ) as r
    where h.progress is not null;

    if v_changed_ids is not null then
      update windlass.tasks t
      set progress = v_changed_progress[array_position(v_changed_ids, t.id)],
          progress_note = v_changed_notes[array_position(v_changed_ids, t.id)]
      where t.id = any (v_changed_ids);
    end if;
  end if;

  -- Release claims that their worker does not name: the answer to its claim was lost. After a lease no worker still
  -- waits for that answer, and without this the task would stay running forever. Claims outside of the tasks that this
  -- heartbeat covers are named by others. The dispatcher's heartbeat names the claims of tasks on nodes.
  perform windlass_internal.release_claim(t.worker_id, t.id, t.claim_token, 'the claim did not reach its worker')
  from (
    select r.id, r.claim_token, r.worker_id
    from (
      select o.id, o.claim_token
      from unnest(v_ids, v_leases, v_kinds, v_first_ids, v_last_ids) as k (id, lease, kind, first_id, last_id)
      cross join lateral (
        select s.id, s.claim_token from windlass.tasks s
        where s.worker_id = k.id and s.status = 'running' and s.started_at < v_now - k.lease
        offset 0
      ) as o
      where k.kind <> 'node' and o.id between k.first_id and k.last_id
      except
      select h.task_id, h.token from unnest(p_task_ids, p_tokens) as h (task_id, token)
    ) as u
    -- Checked again on the locked row: it may have been released and claimed again meanwhile.
    cross join lateral (
      select c.id, c.claim_token, c.worker_id from windlass.tasks c
      where c.id = u.id and c.claim_token = u.claim_token and c.finished_at is null
      for no key update skip locked
    ) as r
  ) as t;
end
$$;

-- A worker reports that it is alive and which claims it holds: [{"task_id", "token", "progress", "note"}]. Returns its
-- status, whether it is paused, and the tokens of claims it has lost. p_vitals: pid, vram_total_mb, vram_used_mb, and
-- anything else to store in metadata, at most 4 KiB. A worker that is terminated or unknown changes no row.
create function windlass.heartbeat(
  p_worker_id text,
  p_claims jsonb default '[]',
  p_vitals jsonb default '{}',
  p_secret text default null,
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
  perform windlass_internal.check_worker(p_worker_id, p_secret);
  if jsonb_array_length(p_claims) > 10000 then
    raise exception 'a heartbeat names at most 10000 claims, not %', jsonb_array_length(p_claims)
      using errcode = 'program_limit_exceeded';
  end if;
  if octet_length(p_vitals::text) > 4096 then
    raise exception 'vitals have at most 4096 bytes, not %', octet_length(p_vitals::text)
      using errcode = 'program_limit_exceeded';
  end if;
  select array_agg((c ->> 'task_id')::bigint), array_agg((c ->> 'token')::uuid), array_agg((c ->> 'progress')::real),
    array_agg(c ->> 'note')
  into v_ids, v_tokens, v_progress, v_notes
  from jsonb_array_elements(p_claims) as c;

  select h.status, h.paused, h.lost into status, paused, lost
  from windlass_internal.record_heartbeats(
    array[p_worker_id], array[p_vitals], array[0], array[9223372036854775807],
    array_fill(p_worker_id, array[coalesce(cardinality(v_ids), 0)]),
    v_ids, v_tokens, v_progress, v_notes, p_waits => true) as h;
end
$$;
