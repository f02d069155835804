-- The ledger: what is to be put into it, putting it there, and asking it.
--
-- How paid time is divided is decided in cost/ledger.py. Here it is made certain that nothing is charged twice and that
-- nothing is forgotten: what is settled, up to when, and the spans that led to it change in one transaction, and only if
-- the account is still as it was when it was read.

-- Workers whose bill is not closed, with what they did in the time that is not: those that are due (settle_at), or all.
-- One statement, so that no attempt is between running and ended. Of a worker with more spans than anybody would look at,
-- the longest are taken.
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
    select d.*
    from windlass.workers d
    where d.settle_at is not null
      and (p_fleet is null or d.fleet = p_fleet)
      and (p_worker_id is null or d.id = p_worker_id)
      and (not p_is_due or d.settle_at <= windlass.now())
    order by case when p_is_due then d.settle_at else d.created_at end, d.id collate "C"
    limit p_limit
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
        select p.task_id, p.queue, p.from_at, p.until_at
        from windlass.attempt_spans p
        where p.worker_id = w.id
        order by p.until_at - p.from_at desc
        limit 20000
      ) as e
      union all
      select r.id, r.queue, r.started_at, null
      from windlass.tasks r
      where r.worker_id = w.id
        and r.status = 'running'
    ) as a
  ) as s
  order by case when p_is_due then w.settle_at else w.created_at end, w.id collate "C"
$$;

-- Close accounts:
--   [{"worker_id", "was_settled_until", "billed_until", "settled_until", "settle_at",
--     "charges": [{"kind", "task_id", "queue", "from_at", "until_at", "amount_micros"}]}]
-- One that has changed since it was read is left as it is. Returns how many were closed.
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
    where w.id = v_settlement ->> 'worker_id'
      and w.settle_at is not null
      and w.settled_until is not distinct from (v_settlement ->> 'was_settled_until')::timestamptz
      and w.billed_until is not distinct from (v_settlement ->> 'billed_until')::timestamptz
    returning w.* into v_worker;
    continue when not found;
    v_count := v_count + 1;

    with charged as (
      insert into windlass.charges (worker_id, fleet, task_id, queue, kind, from_at, until_at, amount_micros, currency)
      select v_worker.id, v_worker.fleet, c.task_id, c.queue, c.kind, c.from_at, c.until_at, c.amount_micros, v_worker.currency
      from jsonb_to_recordset(v_settlement -> 'charges') as c (
        task_id bigint, queue text, kind text, from_at timestamptz, until_at timestamptz, amount_micros bigint
      )
      returning queue, kind, from_at, amount_micros
    )
    insert into windlass.spending as s (fleet, hour, currency, queue, task_micros, boot_micros, idle_micros, tail_micros)
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
    -- In one order for all who settle, so that two of them never wait for each other.
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


-- --------------------------------------------------------------------------------------------------------- views

-- What is settled, by day (UTC) and fleet.
create view windlass.daily_costs as
select
  (s.hour at time zone 'UTC')::date as day,
  s.fleet,
  s.currency,
  sum(s.task_micros)::bigint as task_micros,
  sum(s.boot_micros)::bigint as boot_micros,
  sum(s.idle_micros)::bigint as idle_micros,
  sum(s.tail_micros)::bigint as tail_micros,
  sum(s.task_micros + s.boot_micros + s.idle_micros + s.tail_micros)::bigint as total_micros
from windlass.spending s
group by 1, 2, 3;

-- What is settled, by task: all its attempts, on whatever worker.
create view windlass.task_costs as
select c.task_id, c.queue, c.currency, sum(c.amount_micros)::bigint as cost_micros
from windlass.charges c
where c.task_id is not null
group by c.task_id, c.queue, c.currency;
