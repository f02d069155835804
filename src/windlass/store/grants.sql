-- Roles with the least privileges, for databases where producers and workers do not connect as the schema's owner.
--
--   windlass_producer   enqueues tasks, waits for their results, retries and cancels them
--   windlass_worker     registers, claims, ends attempts, sends heartbeats, recovers lost workers, applies retention
--
-- The functions run with the privileges of their caller, so a role also needs those on the tables, and on the internal
-- functions that the public functions call. Apply this file as the schema's owner, after every migration; it may be
-- repeated. Then grant the roles:
--   grant windlass_producer to shop;
--   grant windlass_worker to render_machines;
-- Operators (windlass up, status, pause, ...) connect as the schema's owner.

do $$
declare
  v_role text;
begin
  foreach v_role in array array['windlass_producer', 'windlass_worker'] loop
    if not exists (select from pg_roles r where r.rolname = v_role) then
      execute format('create role %I nologin', v_role);
    end if;
  end loop;
end
$$;

grant usage on schema windlass, windlass_internal to windlass_producer, windlass_worker;
-- Programs check whether the database supports their contract version.
grant select on windlass.migrations to windlass_producer, windlass_worker;
grant execute on function
  windlass_internal.is_name, windlass_internal.add_event, windlass_internal.record_attempt_span
to windlass_producer, windlass_worker;

grant select on windlass.tasks to windlass_producer;
grant insert (queue, payload, priority, run_after, max_attempts, timeout_s, unique_key)
on windlass.tasks to windlass_producer;
-- retry_task, retry_failed, cancel_task. Payloads and results cannot be changed.
grant update (
  status, run_after, ready_at, attempts, claim_token, worker_id, started_at, finished_at, progress, progress_note,
  error_code, error
) on windlass.tasks to windlass_producer;
grant insert (code, reason, fleet, worker_id, task_id, detail) on windlass.events to windlass_producer;
-- cancel_task records the worker's time if it has a price.
grant insert on windlass.attempt_spans to windlass_producer;
grant select (id, slot, machine_id, price_micros_per_hour) on windlass.workers to windlass_producer;

grant execute on function
  windlass_internal.error_headline, windlass_internal.truncate_error, windlass_internal.retry_delay_s,
  windlass_internal.record_attempt_spans, windlass_internal.record_failure, windlass_internal.record_successes,
  windlass_internal.failed_attempts, windlass_internal.failed_attempts_text, windlass_internal.reject_late_results,
  windlass_internal.acts_for,
  windlass_internal.max_heartbeat_gap_s, windlass_internal.record_heartbeats, windlass_internal.requeue_tasks_of,
  windlass_internal.dispatcher_and_nodes,
  windlass_internal.fail_worker, windlass_internal.refund_attempts, windlass_internal.is_held,
  windlass_internal.follow_clock
to windlass_worker;
grant select, update, delete on windlass.tasks to windlass_worker;
grant select, insert, update, delete on windlass.workers to windlass_worker;
-- register_worker creates the fleet that the worker names.
grant select, insert on windlass.fleets to windlass_worker;
grant select, insert, delete on windlass.events to windlass_worker;
-- recover_lost_workers: whether there is a leader, and the slot of a lost worker.
grant select on windlass.leases to windlass_worker;
grant select, update on windlass.slots to windlass_worker;
-- sweep.
grant select, delete on windlass.cycles, windlass.logs to windlass_worker;
grant select, delete on windlass.charges, windlass.spending to windlass_worker;
-- The ledger's record of attempts, and sweep.
grant select, insert, delete on windlass.attempt_spans to windlass_worker;
