-- Everything that a cycle observes.

-- A duration from a worker's metadata, which is stored unchecked. Null unless it is a number from 0 to 1e9: a value
-- that cannot be cast would stop the cycles of the whole fleet. Rounded, because 1e-400 cannot be cast either.
create function windlass_internal.reported_seconds(p_value jsonb) returns double precision
language sql immutable parallel safe
as $$
  select case
    when jsonb_typeof(p_value) <> 'number' then null
    when p_value::numeric between 0 and 1e9 then round(p_value::numeric, 30)::double precision
  end
$$;

-- Everything that a cycle must know about a fleet, in one round trip; it also renews the lease. The first row has the
-- header: JSON in the form of model/snapshot.py, or {"term": null} while another holder leads. Each further row is a
-- worker that is not terminated, repeated for each of its running tasks: thousands of rows cost little more than
-- reading them.
create function windlass_internal.observe(
  p_lease text,
  p_holder text,
  p_ttl_s double precision,
  p_fleet text,
  p_provider text,
  p_queues text[],
  p_min_workers integer,
  p_max_workers integer,
  p_failure_window_s double precision,
  p_restart_window_s double precision,
  p_quarantine_min_failures integer
) returns table (
  header json,
  id text,
  slot integer,
  status text,
  is_paused boolean,
  concurrency integer,
  created_at timestamptz,
  activated_at timestamptz,
  last_heartbeat timestamptz,
  first_claimed_at timestamptz,
  terminating_at timestamptz,
  idle_s double precision,
  machine_id text,
  machine_at timestamptz,
  creation text,
  prepared_at timestamptz,
  vram_total_mb integer,
  vram_used_mb integer,
  vram_at timestamptz,
  vram_lost_at timestamptz,
  code text,
  reason text,
  lease_s double precision,
  price_micros_per_hour bigint,
  price_parts jsonb,
  currency text,
  billing_unit_s integer,
  billed_since timestamptz,
  settled_until timestamptz,
  prepare_code text,
  prepare_reason text,
  host_key text,
  node jsonb,
  failing_since timestamptz,
  provider text,
  running_at timestamptz,
  progress_at timestamptz,
  address text,
  machine_host text,
  instance_type text,
  place text,
  machine_created_at timestamptz,
  fingerprint text,
  task_id bigint,
  task_started_at timestamptz,
  task_timeout_s double precision,
  task_queue text
)
language plpgsql
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
  v_now timestamptz := windlass.now();
  v_term bigint := windlass_internal.acquire_lease_term(p_lease, p_holder, p_ttl_s);
begin
  if v_term is null then
    header := windlass_internal.standby_answer(p_lease);
    return next;
    return;
  end if;
  perform windlass_internal.follow_clock();

  insert into windlass.fleets as f (name, provider, queues, min_workers, max_workers)
  values (p_fleet, p_provider, p_queues, p_min_workers, p_max_workers)
  on conflict (name) do update
    set provider = excluded.provider, queues = excluded.queues,
        min_workers = excluded.min_workers, max_workers = excluded.max_workers
    where (f.provider, f.queues, f.min_workers, f.max_workers)
      is distinct from (excluded.provider, excluded.queues, excluded.min_workers, excluded.max_workers);

  header := (
    select json_build_object(
      'term', v_term,
      'snapshot', json_build_object(
        'now', v_now,
        'fleet', p_fleet,
        'is_paused', f.paused,
        'requested', f.requested_workers,
        'reset_at', f.reset_at,
        'restarted_at', f.restarted_at,
        'deploy', f.deploy,
        'planner_state', f.planner_state,
        'queue', windlass_internal.observe_queues(
          p_queues, v_now, p_fleet, (f.planner_state -> 'scaling' ->> 'newest_task_id')::bigint),
        'refusal', windlass_internal.last_refusal(p_fleet),
        'slots', coalesce((
          select json_agg(json_build_object(
            'slot', s.slot,
            'is_failed', s.status = 'failed',
            'restarts', array(
              select r from unnest(s.restarts) as r where r > v_now - make_interval(secs => p_restart_window_s)
              order by r
            )
          ) order by s.slot)
          from windlass.slots s
          where s.fleet = p_fleet
            and (s.status = 'failed' or s.last_restart_at > v_now - make_interval(secs => p_restart_window_s))
        ), '[]'),
        'launches', coalesce((
          -- Spawned in the window, or failed in it: a machine may take longer to fail than the window. Bounded: the
          -- failure rate of a fleet that spawns 1,000 workers within minutes is known from fewer.
          select json_agg(
            json_build_object(
              'at', h.created_at, 'has_failed', h.failed_at is not null and not h.is_proven, 'slot', h.slot)
            order by h.created_at, h.id collate "C"
          )
          from (
            select w.id, w.created_at, w.failed_at, w.is_proven, w.slot from windlass.workers w
            where w.fleet = p_fleet and w.slot is not null
              and (
                w.created_at > v_now - make_interval(secs => p_failure_window_s)
                or w.failed_at > v_now - make_interval(secs => p_failure_window_s)
              )
              -- The host was at fault, not the image.
              and w.code is distinct from 'HOST_AVOIDED'
              -- Written before the clock was set back.
              and greatest(w.created_at, w.failed_at) <= v_now
            order by w.created_at desc, w.id collate "C" desc limit 1000
          ) as h
        ), '[]'),
        'last_failure', (
          select json_build_object('worker_id', w.id, 'code', w.code, 'reason', w.reason, 'at', w.failed_at)
          from windlass.workers w
          where w.fleet = p_fleet
            and w.slot is not null and w.failed_at is not null
          order by w.failed_at desc, w.id collate "C" desc limit 1
        ),
        'boots', (
          select json_build_object('count', count(*), 'p50_s', percentile_cont(0.5) within group (order by b.boot_s),
            'p99_s', percentile_cont(0.99) within group (order by b.boot_s))
          from (
            select extract(epoch from w.activated_at - w.created_at) as boot_s from windlass.workers w
            where w.fleet = p_fleet and w.slot is not null
            order by w.created_at desc, w.id collate "C" desc limit 50
          ) as b
          where b.boot_s is not null
        ),
        'spending', windlass_internal.observe_spending(p_fleet, v_now),
        'ended_bills', coalesce((
          -- Bounded: terminated workers are settled within minutes.
          select json_agg(json_build_object(
            'tariff', json_build_object(
              'price_micros_per_hour', e.price_micros_per_hour,
              'currency', e.currency,
              'unit_s', e.billing_unit_s,
              'parts', e.price_parts
            ),
            'since', e.billed_since,
            'until', e.billed_until,
            'settled_until', e.settled_until
          ) order by e.created_at, e.id collate "C")
          from (
            select w.* from windlass.workers w
            where w.fleet = p_fleet and w.settle_at is not null and w.status = 'terminated'
            order by w.settle_at limit 1000
          ) as e
        ), '[]'),
        'is_settlement_due', exists (
          select from windlass.workers w where w.fleet = p_fleet and w.settle_at <= v_now
        ),
        'has_due_rows', exists (select from windlass.deferred_rows d where d.retry_at <= v_now),
        'storage', windlass_internal.observe_storage(p_fleet),
        'avoided_hosts', array(
          -- Index workers_failed. Codes of checks that depend on the host. An image may be at fault for the last two:
          -- they count only for the code and settings of the newest worker. `windlass restart` clears all.
          select w.machine_host from windlass.workers w
          where w.fleet = p_fleet and w.machine_host is not null
            and w.failed_at > greatest(v_now - interval '1 day', f.reset_at)
            and (
              w.code in ('GPU_NOT_DETECTED', 'STORAGE_NOT_MOUNTED')
              or w.code in ('DISK_FULL', 'SSH_UNREACHABLE') and w.fingerprint is not distinct from (
                select l.fingerprint from windlass.workers l where l.fleet = p_fleet and l.slot is not null
                order by l.created_at desc, l.id collate "C" desc limit 1
              )
            )
          group by w.machine_host having count(*) >= 2
          order by w.machine_host collate "C" limit 1000
        ),
        'failure_streaks', windlass_internal.observe_failure_streaks(p_fleet, p_queues, p_quarantine_min_failures),
        'orphaned', array(
          select t.worker_id from windlass.tasks t
          left join windlass.workers w on w.id = t.worker_id
          where t.status = 'running'
            and (w.fleet = p_fleet or (w.id is null and t.queue = any (p_queues)))
            and (w.id is null or w.status in ('error', 'terminated'))
          group by t.worker_id order by t.worker_id collate "C"
        )
      )
    )
    from windlass.fleets f where f.name = p_fleet
  );
  return next;

  return query
    select
      null::json, w.id, w.slot, w.status, w.paused, w.concurrency, w.created_at, w.activated_at, w.last_heartbeat,
      w.first_claimed_at, w.terminating_at, windlass_internal.reported_seconds(w.metadata -> 'idle_s'), w.machine_id, w.machine_at,
      w.creation, w.prepared_at, w.vram_total_mb, w.vram_used_mb, w.vram_at, w.vram_lost_at, w.code, w.reason,
      w.lease_s::double precision, w.price_micros_per_hour, w.price_parts, w.currency, w.billing_unit_s, w.billed_since,
      w.settled_until, w.prepare_code, w.prepare_reason, w.host_key, w.node, w.failing_since,
      w.provider, w.running_at, greatest(w.boot_step_at, w.reachable_at, w.joined_at, w.preparing_at, w.prepared_at),
      w.address, w.machine_host, w.instance_type, w.place, w.machine_created_at, w.fingerprint, t.id, t.started_at,
      t.timeout_s::double precision, case when cardinality(p_queues) > 1 then t.queue end
    from windlass.workers w
    left join windlass.tasks t on t.worker_id = w.id and t.status = 'running'
    where w.fleet = p_fleet and w.status <> 'terminated'
    order by w.created_at, w.id collate "C", t.id;
end
$$;

-- Settled costs of a fleet in the current hour, day and month, per currency.
create function windlass_internal.observe_spending(p_fleet text, p_now timestamptz) returns json
language sql stable
as $$
  select coalesce(json_agg(json_build_object(
    'currency', m.currency, 'hour_micros', m.hour_micros, 'day_micros', m.day_micros, 'month_micros', m.month_micros
  ) order by m.currency collate "C"), '[]')
  from (
    select
      s.currency,
      coalesce(sum(t.micros) filter (where s.hour = date_trunc('hour', p_now, 'UTC')), 0) as hour_micros,
      coalesce(sum(t.micros) filter (where s.hour >= date_trunc('day', p_now, 'UTC')), 0) as day_micros,
      sum(t.micros) as month_micros
    from windlass.spending s
    cross join lateral (select s.task_micros + s.boot_micros + s.idle_micros + s.tail_micros as micros) as t
    -- Not later: the clock may have been set back.
    where s.fleet = p_fleet and s.hour between date_trunc('month', p_now, 'UTC') and p_now
    group by s.currency
  ) as m
$$;


-- The newest refusal that no created machine followed, as {"code", "reason", "at"}; null if there is none. The last 50
-- spawned workers suffice: no more are requested before the first answers arrive. Index workers_managed.
create function windlass_internal.last_refusal(p_fleet text) returns json
language sql stable
as $$
  with recent as (
    select w.id, w.created_at, w.creation, w.code, w.reason, w.terminated_at, w.machine_at
    from windlass.workers w
    where w.fleet = p_fleet
      and w.slot is not null
    order by w.created_at desc, w.id collate "C" desc limit 50
  )
  select json_build_object('code', r.code, 'reason', r.reason, 'at', r.terminated_at)
  from recent r
  where r.creation = 'refused'
    and r.code in ('LIMIT_REACHED', 'DENIED', 'INVALID_REQUEST', 'NO_CAPACITY', 'PROVIDER_PAUSE')
    and not exists (select from recent n where n.machine_at > r.terminated_at)
  order by r.terminated_at desc, r.created_at desc, r.id collate "C" desc limit 1
$$;

-- The newest report of a fleet's workers about the used space of their shared storage; null if there is none. It came
-- with a heartbeat, whose metadata is stored unchecked, so only whole numbers of at most 18 digits are accepted.
create function windlass_internal.observe_storage(p_fleet text) returns json
language sql stable
as $$
  select json_build_object('worker_id', w.id, 'used_bytes', w.metadata -> 'storage_used_bytes', 'at', w.last_heartbeat)
  from windlass.workers w
  where w.fleet = p_fleet
    and w.status in ('spawning', 'active', 'terminating') and w.last_heartbeat is not null
    and (w.metadata -> 'storage_used_bytes')::text ~ '^-?[0-9]{1,18}$'
  order by w.last_heartbeat desc, w.id collate "C" desc limit 1
$$;
