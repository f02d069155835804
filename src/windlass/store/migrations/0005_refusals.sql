-- Why a fleet that wants machines has none: the last answer to its creations, where it was a no that concerns them all.

-- The newest refusal of the whole fleet that no machine was had after, as {"code", "reason", "at"}; null if there is none.
-- Called by store/control.py in the round trip that observes. The last fifty hired are enough: more than that are never
-- asked for before the first answers are in. Index workers_hired.
create function windlass.last_refusal(p_fleet text) returns json
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
    and r.code in ('LimitReached', 'Denied', 'NoCapacity')
    and not exists (select from recent n where n.machine_at > r.terminated_at)
  order by r.terminated_at desc, r.created_at desc, r.id collate "C" desc
  limit 1
$$;
