-- The control plane writes: decisions of a plan before any provider call, outcomes of the calls after it.
--
-- A decision needs the lease. An outcome is a fact and is recorded even if its reporter has lost the lease.

-- How many more workers a person may request: slots that are not failed and have no spawning or active worker. A
-- terminating worker leaves its slot to another.
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
  from windlass.fleets f where f.name = p_fleet
$$;

-- Reserve free slots for new workers before any provider is called. Returns the ids that got a slot. A slot that was
-- taken meanwhile, or lies beyond the fleet's maximum, is not granted. Workers in slots beyond a lowered maximum still
-- have machines, so they count too.
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
  from windlass.fleets f where f.name = p_fleet;

  insert into windlass.slots (fleet, slot)
  select p_fleet, (i ->> 'slot')::integer
  from jsonb_array_elements(p_intents) as i
  on conflict do nothing;

  with reserved as (
    insert into windlass.workers (
      id, fleet, slot, status, paused, provider, queues, reason, lease_s, concurrency, kind, secret_hash,
      join_token_hash, join_expires_at, fingerprint
    )
    select i ->> 'worker_id', p_fleet, (i ->> 'slot')::integer, 'spawning', f.paused, f.provider, f.queues, null,
      coalesce((i ->> 'lease_s')::double precision, 30),
      coalesce((i ->> 'concurrency')::integer, 1),
      coalesce(i ->> 'kind', 'worker'),
      decode(i ->> 'secret_hash', 'hex'),
      decode(i ->> 'join_token_hash', 'hex'),
      windlass.now() + make_interval(secs => (i ->> 'join_ttl_s')::double precision),
      i ->> 'fingerprint'
    from jsonb_array_elements(p_intents) with ordinality as e (i, position)
    join windlass.fleets f on f.name = p_fleet
    join windlass.slots s on s.fleet = p_fleet and s.slot = (i ->> 'slot')::integer and s.status = 'ok'
    where (i ->> 'slot')::integer < f.max_workers
      and not exists (
        select from windlass.workers w where w.fleet = p_fleet and w.slot = s.slot and w.status <> 'terminated'
      )
    order by e.position limit greatest(v_room, 0)
    on conflict do nothing
    returning id, slot
  ),
  recorded as (
    insert into windlass.events (code, reason, fleet, worker_id, cycle_id, detail)
    select 'WORKER_SPAWNED', i ->> 'reason', p_fleet, h.id, p_cycle_id,
      jsonb_build_object(
        'slot', h.slot,
        'cause', case when s.needs_replacement then 'worker_replacement' else coalesce(i ->> 'cause', 'queue_depth') end
      )
    from reserved h
    join windlass.slots s on s.fleet = p_fleet and s.slot = h.slot
    join jsonb_array_elements(p_intents) as i on i ->> 'worker_id' = h.id
  ),
  replaced as (
    update windlass.slots s set needs_replacement = false
    from reserved h
    where s.fleet = p_fleet and s.slot = h.slot and s.needs_replacement
  )
  select coalesce(array_agg(h.id order by h.id), '{}') into v_granted from reserved h;

  -- Subtract only workers spawned for a request: later requests stay open. Requests that no slot can take are dropped:
  -- otherwise they would spawn a worker later, when an idle worker is drained.
  update windlass.fleets
  set requested_workers = greatest(
    0, least(requested_workers - requests.granted, windlass_internal.requestable_workers(p_fleet)))
  from (
    select count(*)::integer as granted
    from jsonb_array_elements(p_intents) as i
    where (i ->> 'is_requested')::boolean and i ->> 'worker_id' = any (v_granted)
  ) as requests
  where name = p_fleet and requested_workers > 0;
  return v_granted;
end
$$;


-- The kind of a decision: its text before the colon, without numbers. `spawn 3: 41 queued` is of the kind `spawn`.
create function windlass_internal.decision_kind(p_decision text) returns text
language sql immutable parallel safe
as $$ select btrim(regexp_replace(split_part(p_decision, ':', 1), '[0-9]+', '', 'g')) $$;

-- Record what a cycle observed and decided, and execute what needs no provider. Raises if the lease is lost: then
-- nothing has changed. Returns {"cycle_id", "granted": [worker ids], "requeued": n}.
create function windlass_internal.commit_plan(
  p_lease text,
  p_holder text,
  p_term bigint,
  p_fleet text,
  p_snapshot json,
  p_actions jsonb,
  p_planner_state jsonb,
  p_decision text,
  p_intents jsonb
) returns jsonb
language plpgsql
as $$
declare
  v_now timestamptz := windlass.now();
  v_step interval;
  v_cycle_id bigint;
  v_requeued integer := 0;
  v_count integer;
  v_action jsonb;
  v_machine jsonb;
  v_machines jsonb;
  v_billing_unit_s integer;
begin
  perform windlass_internal.require_lease(p_lease, p_holder, p_term);
  -- Before any worker, as in pause_fleet: the other order would be a deadlock.
  perform from windlass.fleets f where f.name = p_fleet for no key update;
  perform windlass_internal.lock_workers(array(select a ->> 'worker_id' from jsonb_array_elements(p_actions) as a));

  -- A cycle without actions and with the decision of the previous one is counted, not stored. One in five minutes is
  -- stored, so that `windlass explain` has a recent snapshot. Without a snapshot, which the caller omits if it is
  -- large, a decision that differs only in its numbers is counted too, for half a minute.
  if p_actions = '[]' then
    update windlass.cycles c
    set repeats = c.repeats + 1, repeated_at = v_now, last_decision = nullif(p_decision, c.decision)
    where c.id = (select max(l.id) from windlass.cycles l where l.fleet = p_fleet)
      and c.plan = '[]'
      and (
        c.decision = p_decision and c.started_at > v_now - interval '5 minutes'
        or p_snapshot is null and c.started_at > v_now - interval '30 seconds'
          and windlass_internal.decision_kind(c.decision) = windlass_internal.decision_kind(p_decision)
      )
    returning c.id into v_cycle_id;
  end if;
  if v_cycle_id is null and p_snapshot is null then
    -- The caller omitted the snapshot because it expected a repeat. Nothing has changed; it repeats the call with it.
    return jsonb_build_object('cycle_id', null);
  end if;
  if v_cycle_id is null then
    insert into windlass.cycles (fleet, term, started_at, snapshot, plan, decision, is_change)
    values (
      p_fleet, p_term, (p_snapshot ->> 'now')::timestamptz, p_snapshot, p_actions, p_decision,
      p_actions <> '[]' or not exists (
        select from windlass.cycles c
        where c.id = (select max(l.id) from windlass.cycles l where l.fleet = p_fleet)
          and windlass_internal.decision_kind(c.decision) = windlass_internal.decision_kind(p_decision)
      )
    )
    returning id into v_cycle_id;
    -- A cycle without provider calls is finished with this call.
    update windlass.cycles set finished_at = v_now
    where id = v_cycle_id
      and not p_actions @? '$[*] ? (@.kind == "delete" || @.kind == "delete_orphan" || @.kind == "spawn" '
        '|| @.kind == "grow_volume")';
  end if;

  -- The machine list of the snapshot has the type and price of each machine that an action takes over. It is null if the
  -- provider returned no list.
  if p_actions @? '$[*] ? (@.kind == "adopt" || @.kind == "record_price")' then
    v_billing_unit_s := p_snapshot #>> '{traits,billing_unit_s}';
    v_machines := (
      select jsonb_object_agg(m ->> 'id', m)
      from json_array_elements(
        case json_typeof(p_snapshot -> 'machines') when 'array' then p_snapshot -> 'machines' else '[]' end
      ) as m
      where m ->> 'id' in (select a ->> 'machine_id' from jsonb_array_elements(p_actions) as a)
    );
  end if;
  for v_action in select a from jsonb_array_elements(p_actions) as a loop
    case v_action ->> 'kind'
      when 'promote' then
        perform windlass_internal.promote_worker(v_action ->> 'worker_id', v_action ->> 'reason');
      when 'fail' then
        v_requeued := v_requeued + windlass_internal.fail_worker(
          v_action ->> 'worker_id', v_action ->> 'code', v_action ->> 'reason', true, v_cycle_id,
          nullif(v_action -> 'evidence', 'null'), nullif(v_action -> 'attempt_refund', 'null'),
          coalesce((v_action ->> 'is_proven')::boolean, false));
      when 'requeue' then
        select r.requeued + r.failed into v_count
        from windlass_internal.requeue_tasks_of(
          array[v_action ->> 'worker_id'], 'WORKER_LOST', v_action ->> 'reason') as r;
        v_requeued := v_requeued + v_count;
      when 'drain' then
        update windlass.workers
        set status = 'terminating', terminating_at = v_now, code = v_action ->> 'code', reason = v_action ->> 'reason'
        where id = v_action ->> 'worker_id' and status in ('spawning', 'active');
        if found then
          perform windlass_internal.add_event('WORKER_TERMINATING', v_action ->> 'reason', p_fleet,
            v_action ->> 'worker_id', null);
        end if;
      when 'adopt' then
        v_machine := v_machines -> (v_action ->> 'machine_id');
        update windlass.workers
        set machine_id = v_action ->> 'machine_id', machine_at = v_now, creation = 'created',
            machine_created_at = (v_machine ->> 'created_at')::timestamptz,
            prepared_at = case when (v_action ->> 'is_prepared')::boolean then coalesce(prepared_at, v_now)
              else prepared_at end,
            instance_type = v_machine ->> 'instance_type', place = v_machine ->> 'place',
            address = v_machine ->> 'address', machine_host = v_machine ->> 'host',
            running_at = case when v_machine ->> 'state' = 'running' then v_now end,
            prepare_code = case when v_machine ->> 'misplaced' is not null then 'MISPLACED' else prepare_code end,
            prepare_reason = coalesce(v_machine ->> 'misplaced', prepare_reason)
        where id = v_action ->> 'worker_id' and machine_id is null;
        if found then
          perform windlass_internal.open_bill(
            v_action ->> 'worker_id', v_machine, v_billing_unit_s);
          perform windlass_internal.add_event('MACHINE_ADOPTED', v_action ->> 'reason', p_fleet,
            v_action ->> 'worker_id', null);
        end if;
      when 'record_price' then
        perform windlass_internal.open_bill(
          v_action ->> 'worker_id', v_machines -> (v_action ->> 'machine_id'), v_billing_unit_s);
      when 'record_machine' then
        update windlass.workers
        set address = coalesce(v_action ->> 'address', address),
            machine_host = coalesce(v_action ->> 'machine_host', machine_host),
            running_at = case when (v_action ->> 'is_running')::boolean then coalesce(running_at, v_now)
              else running_at end
        where id = v_action ->> 'worker_id' and machine_id = v_action ->> 'machine_id';
      when 'prepare' then
        -- Recorded before the program is started, so that an interrupted preparation is recognized.
        update windlass.workers set preparing_at = v_now
        where id = v_action ->> 'worker_id' and status = 'spawning' and preparing_at is null;
        if found then
          perform windlass_internal.add_event('MACHINE_PREPARING', v_action ->> 'reason', p_fleet,
            v_action ->> 'worker_id', null);
        end if;
      when 'fail_slot' then
        update windlass.slots
        set status = 'failed', failed_at = v_now, failed_reason = v_action ->> 'reason'
        where fleet = p_fleet and slot = (v_action ->> 'slot')::integer;
        perform windlass_internal.add_event('SLOT_FAILED', v_action ->> 'reason', p_fleet, null, null,
          jsonb_build_object('slot', (v_action ->> 'slot')::integer));
      when 'alert' then
        perform windlass_internal.add_event('ALERT', v_action ->> 'reason', p_fleet, v_action ->> 'worker_id', null,
          jsonb_strip_nulls(
            jsonb_build_object('code', v_action ->> 'code', 'about', nullif(v_action ->> 'about', ''))));
      when 'event' then
        perform windlass_internal.add_event(v_action ->> 'code', v_action ->> 'reason', p_fleet, null, null);
      when 'delete', 'delete_orphan', 'spawn', 'grow_volume' then
        null;  -- Provider calls: executed after this commit.
      else
        raise exception 'unknown action kind %', v_action ->> 'kind';
    end case;
  end loop;

  -- The clock may have been set back since the snapshot, and follow_clock has corrected the former state already.
  v_step := (p_planner_state #>> '{cadence,planned_at}')::timestamptz - v_now;
  update windlass.fleets
  set planner_state = case
      when v_step between interval '1 microsecond' and interval '1 day'
        then windlass_internal.moved_back_json(p_planner_state, v_now, v_step)
      else p_planner_state
    end
  where name = p_fleet;

  return jsonb_build_object(
    'cycle_id', v_cycle_id,
    'granted', windlass_internal.reserve_slots(p_fleet, p_intents, v_cycle_id),
    'requeued', v_requeued
  );
end
$$;
