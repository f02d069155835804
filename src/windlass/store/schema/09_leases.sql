-- Leases: one leader per orchestrator name, one dispatcher per Ray fleet.
--
-- Every decision of a leader checks its lease term in the transaction that writes it, so a former leader that wakes up
-- late can write nothing.

-- Acquire or renew the lease. Returns the term, or null while another holder has it. A new holder gets a new term.
--
-- A lease that ends later than its ttl_s from now was written before the clock was set back. It is shortened to ttl_s
-- from now: a live holder renews it in that time, and a dead one blocks no candidate longer.
create function windlass_internal.acquire_lease_term(p_name text, p_holder text, p_ttl_s double precision)
returns bigint
language sql
as $$
  insert into windlass.leases as l (name, holder, term, expires_at, ttl_s)
  values (p_name, p_holder, 1, windlass.now() + make_interval(secs => p_ttl_s), p_ttl_s)
  on conflict (name) do update
    set (holder, term, expires_at, ttl_s) = (
      select excluded.holder, case when l.holder = excluded.holder then l.term else l.term + 1 end,
        excluded.expires_at, excluded.ttl_s
      where l.holder = excluded.holder or l.expires_at <= windlass.now()
      union all
      select l.holder, l.term, windlass.now() + make_interval(secs => l.ttl_s), l.ttl_s
      where l.holder <> excluded.holder and l.expires_at > windlass.now()
    )
    where l.holder = excluded.holder
      or l.expires_at <= windlass.now()
      or l.expires_at > windlass.now() + make_interval(secs => l.ttl_s)
  returning case when l.holder = p_holder then l.term end
$$;

-- The answer to a candidate while another holder has the lease.
create function windlass_internal.standby_answer(p_name text) returns json
language sql stable
as $$
  select json_build_object(
    'term', null, 'holder', l.holder,
    'expires_in_s', greatest(0, extract(epoch from l.expires_at - windlass.now())), 'now', windlass.now()
  ) from windlass.leases l where l.name = p_name
$$;

-- The same for a caller that needs the waiting time: {"term"} or {"term": null, "holder", "expires_in_s", "now"}.
create function windlass_internal.acquire_lease(p_name text, p_holder text, p_ttl_s double precision) returns json
language plpgsql
as $$
declare
  v_term bigint := windlass_internal.acquire_lease_term(p_name, p_holder, p_ttl_s);
begin
  if v_term is not null then
    return json_build_object('term', v_term);
  end if;
  return windlass_internal.standby_answer(p_name);
end
$$;

-- Release the lease, so that a standby need not wait until it expires. The term stays.
create function windlass_internal.release_lease(p_name text, p_holder text) returns void
language sql
as $$
  update windlass.leases set expires_at = windlass.now() where name = p_name and holder = p_holder
$$;

-- Release all leases of a process that died, for its successor. An uncommitted plan of the dead process either commits
-- before this, or is refused.
create function windlass_internal.release_leases(p_holder text) returns void
language sql
as $$
  update windlass.leases set expires_at = windlass.now() where holder = p_holder and expires_at > windlass.now()
$$;

create function windlass_internal.require_lease(p_name text, p_holder text, p_term bigint) returns void
language plpgsql
as $$
begin
  -- Locked until the caller's transaction ends: the leader cannot change between this check and the write it protects.
  perform from windlass.leases l
  where l.name = p_name and l.holder = p_holder and l.term = p_term and l.expires_at > windlass.now()
  for update;
  if not found then
    raise exception 'lease % with term % is no longer held by %', p_name, p_term, p_holder
      using errcode = 'object_not_in_prerequisite_state';
  end if;
end
$$;
