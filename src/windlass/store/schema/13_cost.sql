-- The ledger: accounts to settle, and settling them.
--
-- cost/ledger.py decides how billed time is divided. These functions ensure that nothing is charged twice or lost: the
-- charges, the time up to which a worker is settled, and the attempt spans change in one transaction, and only if the
-- account is still as it was read.

-- Workers whose bill is not closed, with their attempts in the unsettled time: those that are due (settle_at), or all.
-- One statement, so that no attempt is missed between running and ended. Of a worker with more than 20,000 spans the
-- longest are taken.
create function windlass_internal.open_accounts(
  p_fleet text, p_worker_id text, p_is_due boolean, p_limit integer
) returns table (
  worker_id text,
  fleet text,
  currency text,
  price_micros_per_hour bigint,
  price_parts jsonb,
  unit_s integer,
  since timestamptz,
  until timestamptz,
  settled_until timestamptz,
  ready_at timestamptz,
  task_ids bigint[],
  queues text[],
  begun timestamptz[],
  ended timestamptz[]
)
language sql stable
set enable_seqscan = off
as $$
  select
    w.id, w.fleet, w.currency, w.price_micros_per_hour, w.price_parts, w.billing_unit_s, w.billed_since,
    w.billed_until, w.settled_until, least(w.activated_at, w.first_claimed_at), s.task_ids, s.queues, s.begun, s.ended
  from (
    select d.* from windlass.workers d
    where d.settle_at is not null
      and (p_fleet is null or d.fleet = p_fleet)
      and (p_worker_id is null or d.id = p_worker_id)
      and (not p_is_due or d.settle_at <= windlass.now())
    order by case when p_is_due then d.settle_at else d.created_at end, d.id collate "C" limit p_limit
  ) as w
  cross join lateral (
    select
      array_agg(a.task_id order by a.from_at, a.task_id) as task_ids,
      array_agg(a.queue order by a.from_at, a.task_id) as queues,
      array_agg(a.from_at order by a.from_at, a.task_id) as begun,
      array_agg(a.until_at order by a.from_at, a.task_id) as ended
    from (
      select e.task_id, e.queue, e.from_at, e.until_at
      from (
        select p.task_id, p.queue, p.from_at, p.until_at from windlass.attempt_spans p
        where p.worker_id = w.id
        order by p.until_at - p.from_at desc limit 20000
      ) as e
      union all
      select r.id, r.queue, r.started_at, null from windlass.tasks r
      where r.worker_id = w.id and r.status = 'running'
    ) as a
  ) as s
  order by case when p_is_due then w.settle_at else w.created_at end, w.id collate "C"
$$;

-- Settle accounts:
--   [{"worker_id", "was_settled_until", "billed_until", "settled_until", "settle_at",
--     "charges": [{"kind", "task_id", "queue", "from_at", "until_at", "amount_micros"}]}]
-- An account that changed since it was read is skipped. Returns how many were settled.
create function windlass_internal.settle_accounts(p_settlements jsonb) returns integer
language plpgsql
as $$
declare
  v_settlement jsonb;
  v_worker windlass.workers;
  v_count integer := 0;
begin
  for v_settlement in select s from jsonb_array_elements(p_settlements) as s loop
    update windlass.workers w
    set settled_until = (v_settlement ->> 'settled_until')::timestamptz,
        settle_at = (v_settlement ->> 'settle_at')::timestamptz
    where w.id = v_settlement ->> 'worker_id' and w.settle_at is not null
      and w.settled_until is not distinct from (v_settlement ->> 'was_settled_until')::timestamptz
      and w.billed_until is not distinct from (v_settlement ->> 'billed_until')::timestamptz
    returning w.* into v_worker;
    continue when not found;
    v_count := v_count + 1;

    with charged as (
      insert into windlass.charges (worker_id, fleet, task_id, queue, kind, from_at, until_at, amount_micros, currency)
      select v_worker.id, v_worker.fleet, c.task_id, c.queue, c.kind, c.from_at, c.until_at, c.amount_micros,
        v_worker.currency
      from jsonb_to_recordset(v_settlement -> 'charges') as c (
        task_id bigint, queue text, kind text, from_at timestamptz, until_at timestamptz, amount_micros bigint
      )
      returning queue, kind, from_at, amount_micros
    )
    insert into windlass.spending as s (
      fleet, hour, currency, queue, task_micros, boot_micros, idle_micros, tail_micros
    )
    select
      v_worker.fleet,
      date_trunc('hour', c.from_at, 'UTC') as hour,
      v_worker.currency,
      coalesce(c.queue, '') as queue,
      coalesce(sum(c.amount_micros) filter (where c.kind = 'task'), 0),
      coalesce(sum(c.amount_micros) filter (where c.kind = 'boot'), 0),
      coalesce(sum(c.amount_micros) filter (where c.kind = 'idle'), 0),
      coalesce(sum(c.amount_micros) filter (where c.kind = 'tail'), 0)
    from charged c
    group by hour, coalesce(c.queue, '')
    -- The same order in every transaction prevents deadlocks.
    order by hour, coalesce(c.queue, '')
    on conflict (fleet, hour, currency, queue) do update
      set task_micros = s.task_micros + excluded.task_micros,
          boot_micros = s.boot_micros + excluded.boot_micros,
          idle_micros = s.idle_micros + excluded.idle_micros,
          tail_micros = s.tail_micros + excluded.tail_micros;

    delete from windlass.attempt_spans p
    where p.worker_id = v_worker.id
      and (p.until_at <= v_worker.settled_until or v_worker.settle_at is null);
  end loop;
  return v_count;
end
$$;

-- The part of the current billing period that has passed.
create function windlass_internal.passed_share(p_since timestamptz, p_unit_s integer, p_now timestamptz) returns real
language sql immutable
as $$ select (mod(greatest(0, extract(epoch from p_now - p_since)), p_unit_s) / p_unit_s)::real $$;

-- How long a worker with a long billing period waits before it claims after a notification, from 0 (not at all) to 1.
-- It is 0 if no idle worker of its fleet has clearly more billed time left. Otherwise it is the part of the worker's own
-- period that has passed. The search for an idle worker stops at the first one, so it mostly reads a few rows. Index
-- workers_live.
create function windlass_internal.claim_delay(p_worker_id text, p_now timestamptz) returns real
language sql stable
as $$
  select case when exists (
    select from windlass.workers o
    where o.fleet = w.fleet and o.status <> 'terminated' and o.status = 'active' and not o.paused
      and o.billing_unit_s = w.billing_unit_s
      and windlass_internal.reported_seconds(o.metadata -> 'idle_s') > 0
      and windlass_internal.passed_share(o.billed_since, o.billing_unit_s, p_now)
        < windlass_internal.passed_share(w.billed_since, w.billing_unit_s, p_now) - 0.05
  ) then windlass_internal.passed_share(w.billed_since, w.billing_unit_s, p_now) else 0 end
  from windlass.workers w
  where w.id = p_worker_id and w.billed_since is not null
$$;
