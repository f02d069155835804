-- The database's clock may be set back: by hand, by a time server, by a failover to another machine.
--
-- Times written before that lie in the future. A worker that died then would look alive, and a retry would wait, for as
-- long as the clock needs to catch up. follow_clock notices the step and moves such times back by its length. It moves
-- what the present state depends on, never history: finished tasks, events, cycles and charges keep their times.
--
-- A clock that was set forward needs no correction. Leases expire and are renewed; no worker judges another until it
-- has had heartbeats without a gap for a lease; a gap between plans counts as an outage; how long a machine may still
-- appear is measured by the leader's own clock.

-- A time moved back by p_step if it lies in the future.
create function windlass_internal.moved_back(p_at timestamptz, p_now timestamptz, p_step interval) returns timestamptz
language sql immutable parallel safe
as $$ select case when p_at > p_now then least(p_at - p_step, p_now) else p_at end $$;

-- The same for all times in a JSON document. Times that lie in the future on purpose (until when something is held)
-- stay in the future.
create function windlass_internal.moved_back_json(p_value jsonb, p_now timestamptz, p_step interval) returns jsonb
language plpgsql immutable
as $$
begin
  return case jsonb_typeof(p_value)
    when 'object' then (
      select coalesce(jsonb_object_agg(f.key, windlass_internal.moved_back_json(f.value, p_now, p_step)), '{}')
      from jsonb_each(p_value) as f
    )
    when 'array' then (
      select coalesce(
        jsonb_agg(windlass_internal.moved_back_json(e.value, p_now, p_step) order by e.place), '[]')
      from jsonb_array_elements(p_value) with ordinality as e (value, place)
    )
    when 'string' then case
      when p_value #>> '{}' ~ '^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d' and (p_value #>> '{}')::timestamptz > p_now
        then to_jsonb((p_value #>> '{}')::timestamptz - p_step)
      else p_value
    end
    else p_value
  end;
end
$$;

-- Notice a clock that was set back, and correct the times that would otherwise block claims, retries, recovery and
-- scaling. Called by every cycle, heartbeat and worker's maintenance, before it locks a row; without a step it reads
-- one row. Runs as the owner: workers may call it and may not change these tables.
create function windlass_internal.follow_clock() returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  -- Not the start of the statement: one that waited for a lock would look like a clock that was set back.
  v_now timestamptz := coalesce(nullif(current_setting('windlass.now', true), '')::timestamptz, clock_timestamp());
  v_seen_at timestamptz;
  v_step interval;
begin
  select c.seen_at into v_seen_at from windlass.clock c;
  -- Calls in parallel may be this much out of order. The row is written every five seconds, not by every call.
  if v_now between v_seen_at - interval '1 second' and v_seen_at + interval '5 seconds' then
    return;
  end if;
  insert into windlass.clock (seen_at) values (v_now) on conflict do nothing;
  select c.seen_at into v_seen_at from windlass.clock c for no key update skip locked;
  if not found or v_now = v_seen_at then
    return;
  end if;
  update windlass.clock set seen_at = v_now;
  if v_now >= v_seen_at - interval '1 second' then
    return;
  end if;

  v_step := v_seen_at - v_now;
  insert into windlass.events (code, reason)
  values ('CLOCK_SET_BACK', format('the database clock was set back by %s s', round(extract(epoch from v_step))));

  update windlass.leases l set expires_at = v_now + make_interval(secs => l.ttl_s)
  where l.expires_at > v_now + make_interval(secs => l.ttl_s);

  -- Locked rows are being written by a transaction that knows the new time.
  update windlass.workers w
  set last_heartbeat = windlass_internal.moved_back(w.last_heartbeat, v_now, v_step),
      heartbeat_gapless_since = windlass_internal.moved_back(w.heartbeat_gapless_since, v_now, v_step)
  where w.id = any (array(
    select h.id from windlass.workers h
    where h.status <> 'terminated' and greatest(h.last_heartbeat, h.heartbeat_gapless_since) > v_now
    for no key update skip locked
  ));

  -- Retrying tasks, and tasks that were released with a delay. A time that a producer chose is not changed.
  update windlass.tasks t
  set run_after = t.run_after - v_step,
      ready_at = windlass_internal.moved_back(t.ready_at, v_now, v_step)
  where t.id = any (array(
    select r.id from windlass.tasks r
    where r.run_after > v_now
      and (r.status = 'error' and r.finished_at > v_now or r.status = 'queued' and r.ready_at > v_now)
    for no key update skip locked
  ));

  update windlass.messages m set due_at = m.due_at - v_step
  where m.due_at > v_now and m.delivered_at is null and m.abandoned_at is null;

  -- After a longer step the clock is more likely to return than to stay. Then corrected ages would be far too high, and
  -- machines and attempts would be ended for it.
  if v_step > interval '1 day' then
    return;
  end if;

  update windlass.workers w
  set created_at = windlass_internal.moved_back(w.created_at, v_now, v_step),
      activated_at = windlass_internal.moved_back(w.activated_at, v_now, v_step),
      first_claimed_at = windlass_internal.moved_back(w.first_claimed_at, v_now, v_step),
      terminating_at = windlass_internal.moved_back(w.terminating_at, v_now, v_step),
      failing_since = windlass_internal.moved_back(w.failing_since, v_now, v_step),
      machine_at = windlass_internal.moved_back(w.machine_at, v_now, v_step),
      preparing_at = windlass_internal.moved_back(w.preparing_at, v_now, v_step),
      prepared_at = windlass_internal.moved_back(w.prepared_at, v_now, v_step),
      vram_at = windlass_internal.moved_back(w.vram_at, v_now, v_step),
      vram_lost_at = windlass_internal.moved_back(w.vram_lost_at, v_now, v_step),
      settle_at = case when w.settle_at > v_now then w.settle_at - v_step else w.settle_at end,
      join_expires_at = case
        when w.created_at > v_now then w.join_expires_at - v_step else w.join_expires_at
      end
  where w.id = any (array(
    select s.id from windlass.workers s
    where (s.status <> 'terminated' or s.settle_at is not null)
      and greatest(
        s.created_at, s.activated_at, s.first_claimed_at, s.terminating_at, s.failing_since, s.machine_at,
        s.preparing_at, s.prepared_at, s.vram_at, s.vram_lost_at, s.settle_at
      ) > v_now
    for no key update skip locked
  ));

  update windlass.tasks t set started_at = windlass_internal.moved_back(t.started_at, v_now, v_step)
  where t.id = any (array(
    select r.id from windlass.tasks r
    where r.status = 'running' and r.started_at > v_now
    for no key update skip locked
  ));

  update windlass.fleets f
  set planner_state = windlass_internal.moved_back_json(f.planner_state, v_now, v_step),
      reset_at = windlass_internal.moved_back(f.reset_at, v_now, v_step),
      restarted_at = windlass_internal.moved_back(f.restarted_at, v_now, v_step);
  update windlass.slots s
  set last_restart_at = windlass_internal.moved_back(s.last_restart_at, v_now, v_step),
      restarts = array(
        select windlass_internal.moved_back(r.at, v_now, v_step)
        from unnest(s.restarts) with ordinality as r (at, place)
        order by r.place
      )
  where s.last_restart_at > v_now;
end
$$;
