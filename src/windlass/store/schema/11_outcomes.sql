-- The control plane writes outcomes of provider calls.
--
-- An outcome is a fact and is recorded even if its reporter has lost the lease.

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
