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

-- Start the bill of a worker's machine. Without effect if the machine has no price, the worker is terminated, or the
-- bill exists.
create function windlass_internal.open_bill(p_worker_id text, p_machine jsonb, p_unit_s integer) returns void
language sql
as $$
  update windlass.workers w
  set price_micros_per_hour = (p_machine ->> 'price_micros_per_hour')::bigint,
      price_parts = coalesce(p_machine -> 'price_parts', '[]'),
      -- ISO 4217 "no currency": a price in an unknown currency is never added to another.
      currency = coalesce(p_machine ->> 'currency', 'XXX'),
      billing_unit_s = coalesce(p_unit_s, 1),
      billed_since = b.since,
      -- The first hour can be settled then. cost/ledger.py computes later times exactly.
      settle_at = b.since + interval '1 hour 1 minute'
  from (select coalesce((p_machine ->> 'created_at')::timestamptz, windlass.now()) as since) as b
  where w.id = p_worker_id and w.status <> 'terminated' and w.billed_since is null
    and p_machine ->> 'price_micros_per_hour' is not null
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
  v_step interval;
  v_cycle_id bigint;
  v_requeued integer := 0;
  v_count integer;
  v_action jsonb;
  v_machine jsonb;
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
        -- The machine list of the snapshot has its type and price.
        v_machine := jsonb_path_query_first(
          p_snapshot, '$.machines[*] ? (@.id == $id)', jsonb_build_object('id', v_action ->> 'machine_id'));
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
            v_action ->> 'worker_id', v_machine, (p_snapshot -> 'traits' ->> 'billing_unit_s')::integer);
          perform windlass_internal.add_event('MACHINE_ADOPTED', v_action ->> 'reason', p_fleet,
            v_action ->> 'worker_id', null);
        end if;
      when 'record_price' then
        perform windlass_internal.open_bill(
          v_action ->> 'worker_id',
          jsonb_path_query_first(
            p_snapshot, '$.machines[*] ? (@.id == $id)', jsonb_build_object('id', v_action ->> 'machine_id')),
          (p_snapshot -> 'traits' ->> 'billing_unit_s')::integer);
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

-- A machine without a worker was deleted. If it had a price it gets a terminated worker row, so that the ledger and the
-- budgets include it.
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

-- Record the outcomes of provider calls. Then reserve the slots that became free, which is a decision and needs the
-- lease. Returns the ids that got a slot; null if reservations were requested and the lease is lost: an error would
-- undo the outcomes.
--   {"kind": "created", "worker_id", "machine": {...} in the form of model/machine.py, "is_prepared", "billing_unit_s"}
--   {"kind": "ambiguous", "worker_id", "reason"}    {"kind": "refused", "worker_id", "code", "reason"}
--   {"kind": "deleted", "worker_id", "machine_id", "code", "reason", "ended_at", "priced": {...} or null,
--    "billing_unit_s", "machine_state", "machine_note", "machine_exit", "boot_log"}
--   {"kind": "not_deleted", "worker_id", "reason"}
--   {"kind": "orphan_deleted", "machine", "reason", "billing_unit_s", "ended_at"}
--   {"kind": "host_key_seen", "worker_id", "machine_id", "host_key"}
--   {"kind": "prepared", "worker_id", "machine_id", "host_key"}
--   {"kind": "preparation_failed", "worker_id", "machine_id", "code", "reason", "output", "host_key"}
--   {"kind": "preparation_unclear", "worker_id", "reason"}
--   {"kind": "volume_grown" or "volume_not_grown", "volume_id", "size_gb", "reason"}
create function windlass_internal.record_outcomes(
  p_fleet text,
  p_cycle_id bigint,
  p_outcomes jsonb,
  p_summary jsonb
) returns void
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
        set machine_id = v_outcome -> 'machine' ->> 'id', machine_at = coalesce(machine_at, v_now),
            machine_created_at = (v_outcome -> 'machine' ->> 'created_at')::timestamptz,
            creation = 'created',
            prepared_at = case when (v_outcome ->> 'is_prepared')::boolean then coalesce(prepared_at, v_now)
              else prepared_at end,
            instance_type = v_outcome -> 'machine' ->> 'instance_type', place = v_outcome -> 'machine' ->> 'place',
            address = coalesce(v_outcome -> 'machine' ->> 'address', address),
            machine_host = coalesce(v_outcome -> 'machine' ->> 'host', machine_host),
            running_at = case when v_outcome -> 'machine' ->> 'state' = 'running' then coalesce(running_at, v_now)
              else running_at end,
            -- Until the next cycle deletes it, it must not join.
            prepare_code = case when v_outcome -> 'machine' ->> 'misplaced' is not null then 'MISPLACED'
              else prepare_code end,
            prepare_reason = coalesce(v_outcome -> 'machine' ->> 'misplaced', prepare_reason)
        where id = v_outcome ->> 'worker_id'
          -- Without a slot, its own row was lost and the worker registered again: its machine is orphaned.
          and slot is not null
          and (machine_id is null or machine_id = v_outcome -> 'machine' ->> 'id');
        if found then
          perform windlass_internal.open_bill(
            v_outcome ->> 'worker_id', v_outcome -> 'machine', (v_outcome ->> 'billing_unit_s')::integer);
        end if;
      when 'ambiguous' then
        update windlass.workers set creation = 'ambiguous'
        where id = v_outcome ->> 'worker_id' and creation is null;
        perform windlass_internal.add_event('MACHINE_AMBIGUOUS', v_outcome ->> 'reason', p_fleet,
          v_outcome ->> 'worker_id', null);
      when 'refused' then
        update windlass.workers
        set status = 'terminated', terminated_at = v_now, creation = 'refused',
            -- Only a plain refusal counts as a failure of the fleet; missing capacity or a lost lease does not.
            failed_at = case when v_outcome ->> 'code' = 'REFUSED' then v_now end,
            code = v_outcome ->> 'code', reason = v_outcome ->> 'reason'
        where id = v_outcome ->> 'worker_id' and status <> 'terminated' and machine_id is null;
        if found then
          perform windlass_internal.add_event('MACHINE_REFUSED', v_outcome ->> 'reason', p_fleet,
            v_outcome ->> 'worker_id', null, jsonb_build_object('code', v_outcome ->> 'code'));
        end if;
      when 'deleted' then
        -- The price may have become known after the machine was gone. Without effect if the bill exists.
        if v_outcome -> 'priced' ->> 'id' is not null then
          perform windlass_internal.open_bill(
            v_outcome ->> 'worker_id', v_outcome -> 'priced', (v_outcome ->> 'billing_unit_s')::integer);
        end if;
        perform windlass_internal.record_boot_log(v_outcome ->> 'worker_id', v_outcome ->> 'boot_log');
        update windlass.workers
        set status = 'terminated', terminated_at = v_now,
            -- Both ends of the bill are times of the provider's clock.
            billed_until = case when billed_since is not null
              then greatest(coalesce((v_outcome ->> 'ended_at')::timestamptz, v_now), billed_since) end,
            -- By then its last results are in the database.
            settle_at = case when settle_at is not null then v_now + interval '60 seconds' end,
            code = coalesce(code, v_outcome ->> 'code'), reason = coalesce(reason, v_outcome ->> 'reason')
        where id = v_outcome ->> 'worker_id' and status <> 'terminated'
          -- The reporter may have lost the lease, and the worker may have got another machine since.
          and (machine_id is null or machine_id = v_outcome ->> 'machine_id');
        if found then
          perform windlass_internal.record_machine_state(
            v_outcome ->> 'worker_id', v_outcome ->> 'machine_state', v_outcome ->> 'machine_note',
            v_outcome -> 'machine_exit');
          perform windlass_internal.requeue_tasks_of(array[v_outcome ->> 'worker_id'], v_outcome ->> 'code',
            v_outcome ->> 'reason');
          perform windlass_internal.add_event('WORKER_TERMINATED', v_outcome ->> 'reason', p_fleet,
            v_outcome ->> 'worker_id', null);
        end if;
      when 'not_deleted' then
        perform windlass_internal.add_event('MACHINE_NOT_DELETED', v_outcome ->> 'reason', p_fleet,
          v_outcome ->> 'worker_id', null);
      when 'host_key_seen' then
        update windlass.workers
        set host_key = v_outcome ->> 'host_key', reachable_at = coalesce(reachable_at, v_now)
        where id = v_outcome ->> 'worker_id' and machine_id = v_outcome ->> 'machine_id' and host_key is null;
      when 'prepared' then
        update windlass.workers
        set prepared_at = v_now, host_key = coalesce(host_key, v_outcome ->> 'host_key')
        where id = v_outcome ->> 'worker_id' and machine_id = v_outcome ->> 'machine_id' and prepared_at is null;
        if found then
          perform windlass_internal.add_event('MACHINE_PREPARED', 'worker program started', p_fleet,
            v_outcome ->> 'worker_id', null);
        end if;
      when 'preparation_failed' then
        -- A worker with a heartbeat, or that was started otherwise, works: the failed preparation does not matter.
        update windlass.workers
        set prepare_code = v_outcome ->> 'code', prepare_reason = v_outcome ->> 'reason',
            host_key = coalesce(host_key, v_outcome ->> 'host_key')
        where id = v_outcome ->> 'worker_id' and machine_id = v_outcome ->> 'machine_id' and status = 'spawning'
          and prepared_at is null and prepare_code is null and last_heartbeat is null;
        if found then
          perform windlass_internal.record_boot_log(v_outcome ->> 'worker_id', v_outcome ->> 'output');
          perform windlass_internal.add_event('PREPARATION_FAILED', v_outcome ->> 'reason', p_fleet,
            v_outcome ->> 'worker_id', null,
            jsonb_build_object('code', v_outcome ->> 'code', 'output', v_outcome ->> 'output'));
        end if;
      when 'preparation_unclear' then
        perform windlass_internal.add_event('PREPARATION_UNCLEAR', v_outcome ->> 'reason', p_fleet,
          v_outcome ->> 'worker_id', null);
      when 'volume_grown', 'volume_not_grown' then
        perform windlass_internal.add_event(upper(v_outcome ->> 'kind'), v_outcome ->> 'reason', p_fleet, null, null,
          jsonb_build_object('volume_id', v_outcome ->> 'volume_id', 'size_gb', (v_outcome ->> 'size_gb')::integer));
      when 'orphan_deleted' then
        perform windlass_internal.record_orphan(p_fleet, v_outcome);
      else
        raise exception 'unknown outcome kind %', v_outcome ->> 'kind';
    end case;
  end loop;

  -- Late outcomes have no summary: the cycle keeps its own.
  update windlass.cycles set finished_at = v_now, summary = coalesce(p_summary, summary) where id = p_cycle_id;
end
$$;
