-- What the control loop needs: one leader, one round trip to see everything, one to write down what was decided.
--
-- Every decision of a leader is checked against its term in the transaction that writes it, so an old leader that
-- wakes up late can write nothing. What happened at a provider is a fact and is written down whoever reports it.

alter table windlass.workers
  -- Who was asked for its machine: a fleet may change its provider, a machine cannot.
  add column provider text,
  -- What became of the call that should have made its machine: created, ambiguous, refused. Null: no answer yet.
  add column creation text check (creation in ('created', 'ambiguous', 'refused')),
  -- When its machine became known to us. A list that was asked for before then says nothing about it.
  add column machine_at timestamptz,
  -- When somebody first set about starting its program on its machine, and when that had been done.
  add column preparing_at timestamptz,
  add column prepared_at timestamptz,
  -- Why it cannot be done, if it cannot.
  add column prepare_code text,
  add column prepare_reason text,
  -- Who its machine proved to be when it first let us in.
  add column host_key text,
  -- Set when it was found broken; not when a person, or the scaling, ended it.
  add column failed_at timestamptz,
  -- What its machine was made with, to join over HTTP once and before this time. Only the hash is kept.
  add column join_token_hash bytea,
  add column join_expires_at timestamptz;

-- What tells this database from every other, whatever address it is reached by: machines are tagged with it.
create table windlass.instance (
  id uuid not null default gen_random_uuid(),
  is_only boolean primary key default true check (is_only)
);
insert into windlass.instance default values;

create function windlass_internal.instance_id() returns uuid
language sql stable
as $$ select id from windlass.instance $$;

create index workers_managed on windlass.workers (fleet, created_at, id collate "C") where slot is not null;
create index workers_failed on windlass.workers (fleet, failed_at) where failed_at is not null;

alter table windlass.fleets
  add column planner_state jsonb not null default '{}',
  -- Workers a person asked for and nobody has hired yet.
  add column requested_workers integer not null default 0 check (requested_workers >= 0),
  -- When a person last said, by `windlass restart`, that what was broken is mended: no guard looks further back.
  add column reset_at timestamptz,
  -- The same of the whole fleet, not of one slot: who says it gives up machines of another account.
  add column restarted_at timestamptz;

alter table windlass.slots
  -- When its workers broke, newest last; what is older than any window is forgotten.
  add column restarts timestamptz[] not null default '{}';

alter table windlass.cycles
  add column decision text,
  -- How often the next cycles saw and decided the same, and when last: they are not stored again.
  add column repeats integer not null default 0,
  add column repeated_at timestamptz;


-- --------------------------------------------------------------------------------------- legal transitions only

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
    raise exception 'worker % cannot go from % to %', old.id, old.status, new.status
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


-- ---------------------------------------------------------------------------------------------------- leadership

-- Take or renew the lease. Returns the term, or null while somebody else holds it. A new holder gets a new term.
create function windlass_internal.acquire_lease_term(p_name text, p_holder text, p_ttl_s double precision) returns bigint
language sql
as $$
  insert into windlass.leases as l (name, holder, term, expires_at)
  values (p_name, p_holder, 1, windlass.now() + make_interval(secs => p_ttl_s))
  on conflict (name) do update
    set holder = excluded.holder,
        term = case when l.holder = excluded.holder then l.term else l.term + 1 end,
        expires_at = excluded.expires_at
    where l.holder = excluded.holder
      or l.expires_at <= windlass.now()
  returning l.term
$$;

-- The same for a caller that wants to know how long to wait: {"term"} or {"term": null, "expires_in_s", "now"}.
create function windlass_internal.acquire_lease(p_name text, p_holder text, p_ttl_s double precision) returns json
language plpgsql
as $$
declare
  v_term bigint := windlass_internal.acquire_lease_term(p_name, p_holder, p_ttl_s);
begin
  if v_term is not null then
    return json_build_object('term', v_term);
  end if;
  return json_build_object('term', null, 'expires_in_s', windlass_internal.lease_expires_in_s(p_name), 'now', windlass.now());
end
$$;

create function windlass_internal.lease_expires_in_s(p_name text) returns double precision
language sql stable
as $$
  select greatest(0, extract(epoch from l.expires_at - windlass.now())) from windlass.leases l where l.name = p_name
$$;

-- Give the lease up, so that another need not wait for it to run out. The term stays.
create function windlass_internal.release_lease(p_name text, p_holder text) returns void
language sql
as $$
  update windlass.leases set expires_at = windlass.now() where name = p_name and holder = p_holder
$$;

create function windlass_internal.require_lease(p_name text, p_holder text, p_term bigint) returns void
language plpgsql
as $$
begin
  -- Locked until the caller's transaction ends: nobody can become leader between this check and what it guards.
  perform from windlass.leases l
  where l.name = p_name
    and l.holder = p_holder
    and l.term = p_term
    and l.expires_at > windlass.now()
  for update;
  if not found then
    raise exception 'the lease % of term % is no longer held by %', p_name, p_term, p_holder
      using errcode = 'object_not_in_prerequisite_state';
  end if;
end
$$;


-- ------------------------------------------------------------------------------------------------------- observe

-- Everything a cycle must know of a fleet, in one round trip, and the lease on the way. The first row has the header, JSON
-- in the shape of model/snapshot.py, or {"term": null} while somebody else leads. Each row after it is a worker that is not
-- terminated, repeated for each task it has at hand: thousands of them cost little more than reading their rows.
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
  preparing_at timestamptz,
  prepare_code text,
  prepare_reason text,
  host_key text,
  node jsonb,
  failing_since timestamptz,
  provider text,
  task_id bigint,
  task_started_at timestamptz,
  task_timeout_s double precision
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
    header := json_build_object('term', null, 'expires_in_s', windlass_internal.lease_expires_in_s(p_lease), 'now', v_now);
    return next;
    return;
  end if;

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
        'planner_state', f.planner_state,
        'queue', windlass_internal.observe_queues(p_queues, v_now),
        'refusal', windlass_internal.last_refusal(p_fleet),
        'slots', coalesce((
          select json_agg(json_build_object(
            'slot', s.slot,
            'is_failed', s.status = 'failed',
            'restarts', array(
              select r from unnest(s.restarts) as r where r > v_now - make_interval(secs => p_restart_window_s) order by r
            )
          ) order by s.slot)
          from windlass.slots s
          where s.fleet = p_fleet
            and (s.status = 'failed' or s.last_restart_at > v_now - make_interval(secs => p_restart_window_s))
        ), '[]'),
        'launches', coalesce((
          -- Hired in the window, or found broken in it: a machine may take longer to fail than the window is long.
          -- Bounded: a fleet that hired this many within minutes has long been judged.
          select json_agg(
            json_build_object('at', h.created_at, 'has_failed', h.failed_at is not null) order by h.created_at, h.id collate "C"
          )
          from (
            select w.id, w.created_at, w.failed_at
            from windlass.workers w
            where w.fleet = p_fleet
              and w.slot is not null
              and (
                w.created_at > v_now - make_interval(secs => p_failure_window_s)
                or w.failed_at > v_now - make_interval(secs => p_failure_window_s)
              )
            order by w.created_at desc, w.id collate "C" desc
            limit 1000
          ) as h
        ), '[]'),
        'last_failure', (
          select json_build_object('worker_id', w.id, 'code', w.code, 'reason', w.reason, 'at', w.failed_at)
          from windlass.workers w
          where w.fleet = p_fleet
            and w.slot is not null
            and w.failed_at is not null
          order by w.failed_at desc, w.id collate "C" desc
          limit 1
        ),
        'boot_p50_s', (
          select percentile_cont(0.5) within group (order by extract(epoch from b.activated_at - b.created_at))
          from (
            select w.activated_at, w.created_at
            from windlass.workers w
            where w.fleet = p_fleet
              and w.slot is not null
            order by w.created_at desc, w.id collate "C" desc
            limit 50
          ) as b
          where b.activated_at is not null
        ),
        'spending', windlass_internal.observe_spending(p_fleet, v_now),
        'ended_bills', coalesce((
          -- Bounded: what ended is settled within minutes.
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
            select w.*
            from windlass.workers w
            where w.fleet = p_fleet
              and w.settle_at is not null
              and w.status = 'terminated'
            order by w.settle_at
            limit 1000
          ) as e
        ), '[]'),
        'is_settlement_due', exists (
          select from windlass.workers w where w.fleet = p_fleet and w.settle_at <= v_now
        ),
        'storage', windlass_internal.observe_storage(p_fleet),
        'failure_streaks', windlass_internal.observe_failure_streaks(p_fleet, p_queues, p_quarantine_min_failures),
        'orphaned', array(
          select t.worker_id
          from windlass.tasks t
          left join windlass.workers w on w.id = t.worker_id
          where t.status = 'running'
            and (w.fleet = p_fleet or (w.id is null and t.queue = any (p_queues)))
            and (w.id is null or w.status in ('error', 'terminated'))
          group by t.worker_id
          order by t.worker_id collate "C"
        )
      )
    )
    from windlass.fleets f
    where f.name = p_fleet
  );
  return next;

  return query
    select
      null::json, w.id, w.slot, w.status, w.paused, w.concurrency, w.created_at, w.activated_at, w.last_heartbeat,
      w.first_claimed_at, w.terminating_at, (w.metadata ->> 'idle_s')::double precision, w.machine_id, w.machine_at,
      w.creation, w.prepared_at, w.vram_total_mb, w.vram_used_mb, w.vram_at, w.vram_lost_at, w.code, w.reason,
      w.lease_s::double precision, w.price_micros_per_hour, w.price_parts, w.currency, w.billing_unit_s, w.billed_since,
      w.settled_until, w.preparing_at, w.prepare_code, w.prepare_reason, w.host_key, w.node, w.failing_since, w.provider,
      t.id, t.started_at, t.timeout_s::double precision
    from windlass.workers w
    left join windlass.tasks t on t.worker_id = w.id and t.status = 'running'
    where w.fleet = p_fleet
      and w.status <> 'terminated'
    order by w.created_at, w.id collate "C", t.id;
end
$$;

-- What the ledger has of the present hour, day and month of a fleet, for each currency.
create function windlass_internal.observe_spending(p_fleet text, p_now timestamptz) returns json
language sql stable
as $$
  select coalesce(json_agg(json_build_object(
    'currency', m.currency, 'hour_micros', m.hour_micros, 'day_micros', m.day_micros, 'month_micros', m.month_micros
  ) order by m.currency collate "C"), '[]')
  from (
    select
      s.currency,
      coalesce(sum(t.micros) filter (where s.hour >= date_trunc('hour', p_now, 'UTC')), 0) as hour_micros,
      coalesce(sum(t.micros) filter (where s.hour >= date_trunc('day', p_now, 'UTC')), 0) as day_micros,
      sum(t.micros) as month_micros
    from windlass.spending s
    cross join lateral (select s.task_micros + s.boot_micros + s.idle_micros + s.tail_micros as micros) as t
    where s.fleet = p_fleet
      and s.hour >= date_trunc('month', p_now, 'UTC')
    group by s.currency
  ) as m
$$;

-- What waits and runs in a fleet's queues. Tasks whose time has come count as waiting; so do those that a dispatcher has
-- claimed and its engine has no place for yet.
create function windlass_internal.observe_queues(p_queues text[], p_now timestamptz) returns json
language sql stable
as $$
  select json_build_object(
    'queued', ready.count + due.count + claimed.held,
    'running', claimed.running,
    'oldest_queued_age_s', extract(epoch from p_now - least(oldest.ready_at, claimed.oldest_held)),
    'duration_p50_s', (
      select percentile_cont(0.5) within group (order by extract(epoch from d.finished_at - d.started_at))
      from (
        -- Of the newest of all queues, as far as we have to look for so many of ours: index tasks_complete. The inner
        -- limit is what a rarely used queue beside a busy one costs.
        select n.started_at, n.finished_at
        from (
          select t.queue, t.started_at, t.finished_at
          from windlass.tasks t
          where t.status = 'complete'
          order by t.finished_at desc
          limit 20000
        ) as n
        where n.queue = any (p_queues)
        order by n.finished_at desc
        limit 500
      ) as d
    )
  )
  from (
    select count(*) as count from windlass.tasks t
    where t.queue = any (p_queues) and t.status = 'queued' and t.run_after is null
  ) as ready
  cross join (
    select count(*) as count from windlass.tasks t
    where t.queue = any (p_queues) and t.run_after is not null and t.run_after <= p_now
  ) as due
  cross join (
    select
      count(*) filter (where w.kind is distinct from 'dispatcher') as running,
      count(*) filter (where w.kind = 'dispatcher') as held,
      min(coalesce(t.ready_at, t.created_at)) filter (where w.kind = 'dispatcher') as oldest_held
    from windlass.tasks t
    left join windlass.workers w on w.id = t.worker_id
    where t.status = 'running' and t.queue = any (p_queues)
  ) as claimed
  left join lateral (
    -- Among the first hundred of each queue: good enough to show, and one probe a queue. Not the first alone, which may
    -- have been put back a moment ago.
    select min(head.ready_at) as ready_at
    from unnest(p_queues) as q (name)
    cross join lateral (
      select coalesce(t.ready_at, t.created_at) as ready_at from windlass.tasks t
      where t.queue = q.name and t.status = 'queued' and t.run_after is null
      order by t.priority desc, t.id
      limit 100
    ) as head
  ) as oldest on true
$$;

-- The newest refusal of the whole fleet that no machine was had after, as {"code", "reason", "at"}; null if there is none.
-- The last fifty hired are enough: more than that are never asked for before the first answers are in. Index workers_managed.
create function windlass_internal.last_refusal(p_fleet text) returns json
language sql stable
as $$
  with recent as (
    select w.id, w.created_at, w.creation, w.code, w.reason, w.terminated_at, w.machine_at
    from windlass.workers w
    where w.fleet = p_fleet
      and w.slot is not null
    order by w.created_at desc, w.id collate "C" desc
    limit 50
  )
  select json_build_object('code', r.code, 'reason', r.reason, 'at', r.terminated_at)
  from recent r
  where r.creation = 'refused'
    and r.code in ('LIMIT_REACHED', 'DENIED', 'INVALID_REQUEST', 'NO_CAPACITY', 'PROVIDER_PAUSE')
    and not exists (select from recent n where n.machine_at > r.terminated_at)
  order by r.terminated_at desc, r.created_at desc, r.id collate "C" desc
  limit 1
$$;


-- -------------------------------------------------------------------------------------------------------- commit

-- Mark a worker as broken and give its tasks to others. p_counts: it broke by itself, so its slot remembers. p_evidence:
-- what speaks against it, for whoever asks. p_acquittal: {"since", "is_trial"}: it is to blame for what failed on it since
-- then (see refund_attempts), and what it has at hand is given back as if never taken.
create function windlass_internal.fail_worker(
  p_worker_id text, p_code text, p_reason text, p_counts boolean default true, p_cycle_id bigint default null,
  p_evidence jsonb default null, p_acquittal jsonb default null
) returns integer
language plpgsql
as $$
declare
  v_now timestamptz := windlass.now();
  v_worker windlass.workers;
  v_released integer := 0;
  v_requeued integer := 0;
begin
  update windlass.workers
  set status = 'error', code = p_code, reason = p_reason, failed_at = case when p_counts then v_now end
  where id = p_worker_id
    and status in ('spawning', 'active', 'terminating')
  returning * into v_worker;
  if not found then
    return 0;
  end if;
  insert into windlass.events (code, reason, fleet, worker_id, cycle_id, detail)
  values ('WORKER_ERROR', p_reason, v_worker.fleet, p_worker_id, p_cycle_id,
    jsonb_strip_nulls(jsonb_build_object('code', p_code, 'evidence', p_evidence)));
  if p_counts and v_worker.slot is not null then
    update windlass.slots
    set restart_count = restart_count + 1, last_restart_at = v_now,
        -- The newest hundred: no restart limit is higher.
        restarts = (restarts || v_now)[greatest(1, cardinality(restarts) - 98):]
    where fleet = v_worker.fleet
      and slot = v_worker.slot;
  end if;
  if p_acquittal is not null then
    perform windlass_internal.refund_attempts(
      p_worker_id, (p_acquittal ->> 'since')::timestamptz, (p_acquittal ->> 'is_trial')::boolean);
    with held as materialized (
      select t.id, t.claim_token
      from windlass.tasks t
      where t.worker_id = p_worker_id
        and t.status = 'running'
      order by t.id
      for no key update skip locked
    )
    select count(*) into v_released
    from held
    where windlass.release_task(p_worker_id, held.id, held.claim_token, 'its worker is to blame for failures');
  end if;
  select r.requeued + r.failed + v_released into v_requeued
  from windlass_internal.requeue_tasks_of(array[p_worker_id], p_code, format('worker %s: %s', p_worker_id, p_reason)) as r;
  return v_requeued;
end
$$;

-- How many more a person may ask for: slots that are not failed and have no worker that stays. One that is on its way out
-- leaves its slot to another.
create function windlass_internal.requestable_workers(p_fleet text) returns integer
language sql stable
as $$
  select f.max_workers - (
    select count(*)::integer
    from (
      select w.slot from windlass.workers w
      where w.fleet = p_fleet and w.slot is not null and w.status in ('spawning', 'active')
      union
      select s.slot from windlass.slots s
      where s.fleet = p_fleet and s.status = 'failed' and s.slot < f.max_workers
    ) as taken
  )
  from windlass.fleets f
  where f.name = p_fleet
$$;

-- Hire into free slots: the intent, before any provider is called. Returns the ids that got a slot; one that is taken
-- meanwhile, or beyond the fleet's maximum, gets none. Workers in slots that a smaller maximum has abolished still have
-- machines, so they count too.
create function windlass_internal.reserve_slots(p_fleet text, p_intents jsonb, p_cycle_id bigint) returns text[]
language plpgsql
as $$
declare
  v_granted text[];
  v_room integer;
begin
  select f.max_workers - (
    select count(*) from windlass.workers w where w.fleet = p_fleet and w.status <> 'terminated' and w.slot is not null
  )
  into v_room
  from windlass.fleets f
  where f.name = p_fleet;

  insert into windlass.slots (fleet, slot)
  select p_fleet, (i ->> 'slot')::integer
  from jsonb_array_elements(p_intents) as i
  on conflict do nothing;

  with hired as (
    insert into windlass.workers (
      id, fleet, slot, status, paused, provider, queues, reason, lease_s, join_token_hash, join_expires_at
    )
    select i ->> 'worker_id', p_fleet, (i ->> 'slot')::integer, 'spawning', f.paused, f.provider, f.queues, null,
      coalesce((i ->> 'lease_s')::double precision, 30),
      decode(i ->> 'join_token_hash', 'hex'),
      windlass.now() + make_interval(secs => (i ->> 'join_ttl_s')::double precision)
    from jsonb_array_elements(p_intents) with ordinality as e (i, position)
    join windlass.fleets f on f.name = p_fleet
    join windlass.slots s on s.fleet = p_fleet and s.slot = (i ->> 'slot')::integer and s.status = 'ok'
    where (i ->> 'slot')::integer < f.max_workers
      and not exists (
        select from windlass.workers w where w.fleet = p_fleet and w.slot = s.slot and w.status <> 'terminated'
      )
    order by e.position
    limit greatest(v_room, 0)
    on conflict do nothing
    returning id, slot
  ),
  noted as (
    insert into windlass.events (code, reason, fleet, worker_id, cycle_id, detail)
    select 'WORKER_SPAWNED', i ->> 'reason', p_fleet, h.id, p_cycle_id, jsonb_build_object('slot', h.slot)
    from hired h
    join jsonb_array_elements(p_intents) as i on i ->> 'worker_id' = h.id
  )
  select coalesce(array_agg(h.id order by h.id), '{}') into v_granted from hired h;

  -- Only what was hired for a person's wish fulfils it: what they asked for since is still to come. What no slot can take
  -- any more is forgotten: later, when somebody was let go for having nothing to do, it would hire another.
  update windlass.fleets
  set requested_workers = greatest(0, least(requested_workers - asked.granted, windlass_internal.requestable_workers(p_fleet)))
  from (
    select count(*)::integer as granted
    from jsonb_array_elements(p_intents) as i
    where (i ->> 'is_requested')::boolean
      and i ->> 'worker_id' = any (v_granted)
  ) as asked
  where name = p_fleet
    and requested_workers > 0;
  return v_granted;
end
$$;

-- From now on the ledger counts what a worker's machine costs. One without a price, or that has ended, has no bill; one
-- that has a bill keeps it.
create function windlass_internal.open_bill(p_worker_id text, p_machine jsonb, p_unit_s integer) returns void
language sql
as $$
  update windlass.workers w
  set price_micros_per_hour = (p_machine ->> 'price_micros_per_hour')::bigint,
      price_parts = coalesce(p_machine -> 'price_parts', '[]'),
      -- ISO 4217 for no currency: a price whose provider does not say in what it is paid is added to no other.
      currency = coalesce(p_machine ->> 'currency', 'XXX'),
      billing_unit_s = coalesce(p_unit_s, 1),
      billed_since = b.since,
      -- The first hour that can be closed: cost/ledger.py says so more exactly when it looks.
      settle_at = b.since + interval '1 hour 1 minute'
  from (select coalesce((p_machine ->> 'created_at')::timestamptz, windlass.now()) as since) as b
  where w.id = p_worker_id
    and w.status <> 'terminated'
    and w.billed_since is null
    and p_machine ->> 'price_micros_per_hour' is not null
$$;

-- Write down what a cycle saw and decided, and do at once what needs no provider. Raises if the lease is lost: then
-- nothing has changed. Returns {"cycle_id", "granted": [worker ids], "requeued": n}.
create function windlass_internal.commit_plan(
  p_lease text,
  p_holder text,
  p_term bigint,
  p_fleet text,
  p_snapshot jsonb,
  p_actions jsonb,
  p_planner_state jsonb,
  p_decision text,
  p_intents jsonb
) returns jsonb
language plpgsql
as $$
declare
  v_now timestamptz := windlass.now();
  v_cycle_id bigint;
  v_requeued integer := 0;
  v_count integer;
  v_action jsonb;
  v_machine jsonb;
begin
  perform windlass_internal.require_lease(p_lease, p_holder, p_term);

  -- A cycle that did nothing and decided what the last one decided is counted, not stored again; but at least one in
  -- five minutes is, so that there is a recent snapshot to explain from.
  if p_actions = '[]' then
    update windlass.cycles c
    set repeats = c.repeats + 1, repeated_at = v_now
    where c.id = (select max(l.id) from windlass.cycles l where l.fleet = p_fleet)
      and c.decision = p_decision
      and c.plan = '[]'
      and c.started_at > v_now - interval '5 minutes'
    returning c.id into v_cycle_id;
  end if;
  if v_cycle_id is null and p_snapshot is null then
    -- The caller thought that there was nothing to store. Nothing has been done; it sends the snapshot along.
    return jsonb_build_object('cycle_id', null);
  end if;
  if v_cycle_id is null then
    insert into windlass.cycles (fleet, term, started_at, snapshot, plan, decision)
    values (p_fleet, p_term, (p_snapshot ->> 'now')::timestamptz, p_snapshot, p_actions, p_decision)
    returning id into v_cycle_id;
    -- One that asks nothing of a provider is over with this call.
    update windlass.cycles
    set finished_at = v_now
    where id = v_cycle_id
      and not p_actions @? '$[*] ? (@.kind == "delete" || @.kind == "delete_orphan" || @.kind == "spawn" || @.kind == "grow_volume")';
  end if;

  for v_action in select a from jsonb_array_elements(p_actions) as a loop
    case v_action ->> 'kind'
      when 'promote' then
        update windlass.workers set status = 'active', activated_at = v_now
        where id = v_action ->> 'worker_id' and status = 'spawning';
        if found then
          perform windlass_internal.add_event('WORKER_ACTIVATED', v_action ->> 'reason', p_fleet, v_action ->> 'worker_id', null);
        end if;
      when 'fail' then
        v_requeued := v_requeued + windlass_internal.fail_worker(
          v_action ->> 'worker_id', v_action ->> 'code', v_action ->> 'reason', true, v_cycle_id,
          nullif(v_action -> 'evidence', 'null'), nullif(v_action -> 'attempt_refund', 'null'));
      when 'requeue' then
        select r.requeued + r.failed into v_count
        from windlass_internal.requeue_tasks_of(array[v_action ->> 'worker_id'], 'WORKER_LOST', v_action ->> 'reason') as r;
        v_requeued := v_requeued + v_count;
      when 'drain' then
        update windlass.workers
        set status = 'terminating', terminating_at = v_now, code = v_action ->> 'code', reason = v_action ->> 'reason'
        where id = v_action ->> 'worker_id' and status in ('spawning', 'active');
        if found then
          perform windlass_internal.add_event('WORKER_TERMINATING', v_action ->> 'reason', p_fleet, v_action ->> 'worker_id', null);
        end if;
      when 'adopt' then
        -- What it is and costs stands in the list in which it was found.
        v_machine := jsonb_path_query_first(
          p_snapshot, '$.machines[*] ? (@.id == $id)', jsonb_build_object('id', v_action ->> 'machine_id'));
        update windlass.workers
        set machine_id = v_action ->> 'machine_id', machine_at = v_now, creation = 'created',
            prepared_at = case when (v_action ->> 'is_prepared')::boolean then coalesce(prepared_at, v_now) else prepared_at end,
            instance_type = v_machine ->> 'instance_type', place = v_machine ->> 'place'
        where id = v_action ->> 'worker_id' and machine_id is null;
        if found then
          perform windlass_internal.open_bill(
            v_action ->> 'worker_id', v_machine, (p_snapshot -> 'traits' ->> 'billing_unit_s')::integer);
          perform windlass_internal.add_event('MACHINE_ADOPTED', v_action ->> 'reason', p_fleet, v_action ->> 'worker_id', null);
        end if;
      when 'record_price' then
        perform windlass_internal.open_bill(
          v_action ->> 'worker_id',
          jsonb_path_query_first(
            p_snapshot, '$.machines[*] ? (@.id == $id)', jsonb_build_object('id', v_action ->> 'machine_id')),
          (p_snapshot -> 'traits' ->> 'billing_unit_s')::integer);
      when 'prepare' then
        -- Before anything is started there: whoever finds it half done knows that it was begun.
        update windlass.workers set preparing_at = v_now
        where id = v_action ->> 'worker_id' and status = 'spawning' and preparing_at is null;
        if found then
          perform windlass_internal.add_event('MACHINE_PREPARING', v_action ->> 'reason', p_fleet, v_action ->> 'worker_id', null);
        end if;
      when 'fail_slot' then
        update windlass.slots
        set status = 'failed', failed_at = v_now, failed_reason = v_action ->> 'reason'
        where fleet = p_fleet and slot = (v_action ->> 'slot')::integer;
        perform windlass_internal.add_event('SLOT_FAILED', v_action ->> 'reason', p_fleet, null, null,
          jsonb_build_object('slot', (v_action ->> 'slot')::integer));
      when 'alert' then
        perform windlass_internal.add_event('ALERT', v_action ->> 'reason', p_fleet, v_action ->> 'worker_id', null,
          jsonb_strip_nulls(jsonb_build_object('code', v_action ->> 'code', 'about', nullif(v_action ->> 'about', ''))));
      when 'delete', 'delete_orphan', 'spawn', 'grow_volume' then
        null;  -- Provider calls: executed after this commit.
      else
        raise exception 'unknown action kind %', v_action ->> 'kind';
    end case;
  end loop;

  update windlass.fleets
  set planner_state = p_planner_state
  where name = p_fleet;

  return jsonb_build_object(
    'cycle_id', v_cycle_id,
    'granted', windlass_internal.reserve_slots(p_fleet, p_intents, v_cycle_id),
    'requeued', v_requeued
  );
end
$$;

-- A machine that no worker had is gone. Where it had a price it gets a row of its own, already ended, so that the ledger
-- and the budgets know of it.
create function windlass_internal.record_orphan(p_fleet text, p_outcome jsonb) returns void
language plpgsql
as $$
declare
  v_machine jsonb := p_outcome -> 'machine';
  v_id text := 'orphan-' || (v_machine ->> 'id');
  v_now timestamptz := windlass.now();
begin
  perform windlass_internal.add_event('ORPHAN_DELETED', p_outcome ->> 'reason', p_fleet, v_machine ->> 'name', null);
  if v_machine ->> 'price_micros_per_hour' is null then
    return;
  end if;
  insert into windlass.workers (id, fleet, status, created_at, terminating_at, machine_id, machine_at, code, reason)
  values (
    v_id, p_fleet, 'terminating', coalesce((v_machine ->> 'created_at')::timestamptz, v_now), v_now, v_machine ->> 'id',
    v_now, 'ORPHAN', format('machine of %s: %s', v_machine ->> 'name', p_outcome ->> 'reason')
  )
  on conflict (id) do nothing;
  if not found then
    return;
  end if;
  perform windlass_internal.open_bill(v_id, v_machine, (p_outcome ->> 'billing_unit_s')::integer);
  update windlass.workers
  set status = 'terminated', terminated_at = v_now, settle_at = v_now,
      billed_until = greatest(coalesce((p_outcome ->> 'ended_at')::timestamptz, v_now), billed_since)
  where id = v_id;
end
$$;

-- Write down what providers did: facts, whoever reports them. Then hire into the slots that became free by it, which
-- is a decision and needs the lease. Returns the ids that got a slot; null if the lease is lost and hirings were asked
-- for: an error would undo the facts.
--   {"kind": "created", "worker_id", "machine": {...} in the shape of model/machine.py, "is_prepared", "billing_unit_s"}
--   {"kind": "ambiguous", "worker_id", "reason"}    {"kind": "refused", "worker_id", "code", "reason"}
--   {"kind": "deleted", "worker_id", "machine_id", "code", "reason", "ended_at"}    {"kind": "not_deleted", "worker_id", "reason"}
--   {"kind": "orphan_deleted", "machine", "reason", "billing_unit_s", "ended_at"}
--   {"kind": "host_key_seen", "worker_id", "machine_id", "host_key"}
--   {"kind": "prepared", "worker_id", "machine_id", "host_key"}
--   {"kind": "preparation_failed", "worker_id", "machine_id", "code", "reason", "output", "host_key"}
--   {"kind": "preparation_unclear", "worker_id", "reason"}
--   {"kind": "volume_grown" or "volume_not_grown", "volume_id", "size_gb", "reason"}
create function windlass_internal.commit_outcomes(
  p_lease text,
  p_holder text,
  p_term bigint,
  p_fleet text,
  p_cycle_id bigint,
  p_outcomes jsonb,
  p_intents jsonb,
  p_summary jsonb
) returns text[]
language plpgsql
as $$
declare
  v_now timestamptz := windlass.now();
  v_outcome jsonb;
begin
  for v_outcome in select o from jsonb_array_elements(p_outcomes) as o loop
    case v_outcome ->> 'kind'
      when 'created' then
        update windlass.workers
        set machine_id = v_outcome -> 'machine' ->> 'id', machine_at = coalesce(machine_at, v_now), creation = 'created',
            prepared_at = case when (v_outcome ->> 'is_prepared')::boolean then coalesce(prepared_at, v_now) else prepared_at end,
            instance_type = v_outcome -> 'machine' ->> 'instance_type', place = v_outcome -> 'machine' ->> 'place'
        where id = v_outcome ->> 'worker_id'
          and (machine_id is null or machine_id = v_outcome -> 'machine' ->> 'id');
        if found then
          perform windlass_internal.open_bill(
            v_outcome ->> 'worker_id', v_outcome -> 'machine', (v_outcome ->> 'billing_unit_s')::integer);
        end if;
      when 'ambiguous' then
        update windlass.workers set creation = 'ambiguous'
        where id = v_outcome ->> 'worker_id' and creation is null;
        perform windlass_internal.add_event('MACHINE_AMBIGUOUS', v_outcome ->> 'reason', p_fleet, v_outcome ->> 'worker_id', null);
      when 'refused' then
        update windlass.workers
        set status = 'terminated', terminated_at = v_now, creation = 'refused',
            -- No capacity, or a lost lead, is nobody's fault; only a plain no counts against the fleet.
            failed_at = case when v_outcome ->> 'code' = 'REFUSED' then v_now end,
            code = v_outcome ->> 'code', reason = v_outcome ->> 'reason'
        where id = v_outcome ->> 'worker_id' and status <> 'terminated' and machine_id is null;
        if found then
          perform windlass_internal.add_event('MACHINE_REFUSED', v_outcome ->> 'reason', p_fleet, v_outcome ->> 'worker_id', null,
            jsonb_build_object('code', v_outcome ->> 'code'));
        end if;
      when 'deleted' then
        update windlass.workers
        set status = 'terminated', terminated_at = v_now,
            -- Its beginning and its end are the provider's word, by the provider's clock.
            billed_until = case when billed_since is not null
              then greatest(coalesce((v_outcome ->> 'ended_at')::timestamptz, v_now), billed_since) end,
            -- What it did last is in the database by then.
            settle_at = case when settle_at is not null then v_now + interval '60 seconds' end,
            code = coalesce(code, v_outcome ->> 'code'), reason = coalesce(reason, v_outcome ->> 'reason')
        where id = v_outcome ->> 'worker_id' and status <> 'terminated'
          -- Whoever reports may have lost the lead: the worker may have got a machine, or another one, since.
          and (machine_id is null or machine_id = v_outcome ->> 'machine_id');
        if found then
          perform windlass_internal.requeue_tasks_of(array[v_outcome ->> 'worker_id'], v_outcome ->> 'code', v_outcome ->> 'reason');
          perform windlass_internal.add_event('WORKER_TERMINATED', v_outcome ->> 'reason', p_fleet, v_outcome ->> 'worker_id', null);
        end if;
      when 'not_deleted' then
        perform windlass_internal.add_event('MACHINE_NOT_DELETED', v_outcome ->> 'reason', p_fleet, v_outcome ->> 'worker_id', null);
      when 'host_key_seen' then
        update windlass.workers set host_key = v_outcome ->> 'host_key'
        where id = v_outcome ->> 'worker_id' and machine_id = v_outcome ->> 'machine_id' and host_key is null;
      when 'prepared' then
        update windlass.workers
        set prepared_at = v_now, host_key = coalesce(host_key, v_outcome ->> 'host_key')
        where id = v_outcome ->> 'worker_id' and machine_id = v_outcome ->> 'machine_id' and prepared_at is null;
        if found then
          perform windlass_internal.add_event('MACHINE_PREPARED', 'its program was started', p_fleet, v_outcome ->> 'worker_id', null);
        end if;
      when 'preparation_failed' then
        -- Whoever has been heard of, or was started by somebody else, works whatever we think.
        update windlass.workers
        set prepare_code = v_outcome ->> 'code', prepare_reason = v_outcome ->> 'reason',
            host_key = coalesce(host_key, v_outcome ->> 'host_key')
        where id = v_outcome ->> 'worker_id' and machine_id = v_outcome ->> 'machine_id' and status = 'spawning'
          and prepared_at is null and prepare_code is null and last_heartbeat is null;
        if found then
          perform windlass_internal.add_event('PREPARATION_FAILED', v_outcome ->> 'reason', p_fleet, v_outcome ->> 'worker_id', null,
            jsonb_build_object('code', v_outcome ->> 'code', 'output', v_outcome ->> 'output'));
        end if;
      when 'preparation_unclear' then
        perform windlass_internal.add_event('PREPARATION_UNCLEAR', v_outcome ->> 'reason', p_fleet, v_outcome ->> 'worker_id', null);
      when 'volume_grown', 'volume_not_grown' then
        perform windlass_internal.add_event(upper(v_outcome ->> 'kind'), v_outcome ->> 'reason', p_fleet, null, null,
          jsonb_build_object('volume_id', v_outcome ->> 'volume_id', 'size_gb', (v_outcome ->> 'size_gb')::integer));
      when 'orphan_deleted' then
        perform windlass_internal.record_orphan(p_fleet, v_outcome);
    end case;
  end loop;

  -- Without a summary these came after their cycle was over: it keeps its own.
  update windlass.cycles set finished_at = v_now, summary = coalesce(p_summary, summary) where id = p_cycle_id;

  if p_intents = '[]' then
    return '{}';
  end if;
  begin
    perform windlass_internal.require_lease(p_lease, p_holder, p_term);
  exception when object_not_in_prerequisite_state then
    return null;
  end;
  return windlass_internal.reserve_slots(p_fleet, p_intents, p_cycle_id);
end
$$;


-- ------------------------------------------------------------------------------------------------------- by hand

create function windlass_internal.require_fleet(p_fleet text) returns void
language plpgsql
as $$
begin
  if not exists (select from windlass.fleets f where f.name = p_fleet) then
    raise exception 'there is no fleet %', p_fleet using errcode = 'invalid_parameter_value';
  end if;
end
$$;

-- Clear a slot's restarts, so that it may be filled again, and what guards hold against the fleet. Null: all slots of the
-- fleet. Returns how many were failed.
create function windlass_internal.restart_slots(p_fleet text, p_slot integer default null) returns integer
language plpgsql
as $$
declare
  v_count integer;
begin
  perform windlass_internal.require_fleet(p_fleet);
  select f.max_workers into v_count from windlass.fleets f where f.name = p_fleet;
  if p_slot not between 0 and v_count - 1
    and not exists (select from windlass.slots s where s.fleet = p_fleet and s.slot = p_slot)
  then
    raise exception 'there is no slot % in fleet %: its slots are 0 to %', p_slot, p_fleet, v_count - 1
      using errcode = 'invalid_parameter_value';
  end if;
  with failed as (
    select s.slot
    from windlass.slots s
    where s.fleet = p_fleet and (p_slot is null or s.slot = p_slot) and s.status = 'failed'
    for update
  )
  select count(*) into v_count from failed;

  update windlass.slots
  set status = 'ok', restart_count = 0, last_restart_at = null, restarts = '{}', failed_at = null, failed_reason = null
  where fleet = p_fleet
    and (p_slot is null or slot = p_slot);
  update windlass.fleets
  set reset_at = windlass.now(),
      restarted_at = case when p_slot is null then windlass.now() else restarted_at end
  where name = p_fleet;
  perform windlass_internal.add_event('SLOTS_RESTARTED', 'restart counts cleared by hand', p_fleet, null, null,
    jsonb_build_object('slot', p_slot));
  return v_count;
end
$$;

-- Ask for workers beyond what the policy wants; a negative count takes a wish back. Returns how many are now asked for
-- and not yet hired, never more than the fleet has room for.
create function windlass_internal.request_workers(p_fleet text, p_count integer) returns integer
language plpgsql
as $$
declare
  v_requested integer;
begin
  perform windlass_internal.require_fleet(p_fleet);
  update windlass.fleets
  set requested_workers = greatest(0, least(requested_workers + p_count, windlass_internal.requestable_workers(p_fleet)))
  where name = p_fleet
  returning requested_workers into v_requested;
  perform windlass_internal.add_event('WORKERS_REQUESTED', 'by hand', p_fleet, null, null, jsonb_build_object('count', p_count));
  return v_requested;
end
$$;

-- Pause or resume a fleet: those there and those to come. Returns how many workers changed.
create function windlass_internal.pause_fleet(p_fleet text, p_paused boolean) returns integer
language plpgsql
as $$
declare
  v_count integer;
begin
  perform windlass_internal.require_fleet(p_fleet);
  update windlass.fleets set paused = p_paused where name = p_fleet;
  update windlass.workers set paused = p_paused
  where fleet = p_fleet and status in ('spawning', 'active', 'terminating') and paused <> p_paused;
  get diagnostics v_count = row_count;
  perform windlass_internal.add_event(case when p_paused then 'FLEET_PAUSED' else 'FLEET_RESUMED' end, 'by hand', p_fleet, null, null);
  return v_count;
end
$$;

-- End a worker at once, whatever it has at hand: nobody's failure, so nothing is counted against its slot or fleet. One
-- that was hired keeps its slot until its machine is gone; one started by hand is over. False if it was over already.
create function windlass_internal.terminate_worker(p_worker_id text, p_reason text) returns boolean
language plpgsql
as $$
declare
  v_is_live boolean;
begin
  perform from windlass.workers w
  where w.id = p_worker_id and w.status in ('spawning', 'active', 'terminating')
  for update;
  v_is_live := found;
  if v_is_live then
    perform windlass_internal.fail_worker(p_worker_id, 'MANUAL', p_reason, false);
    update windlass.workers
    set status = 'terminated', terminated_at = windlass.now()
    where id = p_worker_id and slot is null;
  end if;
  return v_is_live;
end
$$;
