-- Two roles that may do their part and nothing else, for databases whose owner does not want to be everybody.
--
--   windlass_producer   puts tasks in, waits for their results, retries and cancels them
--   windlass_worker     registers, claims, finishes, beats, and looks after other workers and retention
--
-- The functions of schema windlass run with the rights of their caller, so a role needs those on the tables too. Apply
-- this as the schema's owner, once and again after every migration; it may be repeated. Then hand the roles on:
--   grant windlass_producer to shop;
--   grant windlass_worker to render_machines;
-- People who operate (windlass up, status, pause, ...) act as the schema's owner.

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
-- A program looks whether the schema is the one it knows.
grant select on windlass.migrations to windlass_producer, windlass_worker;

grant select on windlass.tasks to windlass_producer;
grant insert (queue, payload, priority, run_after, max_attempts, timeout_s, unique_key) on windlass.tasks to windlass_producer;
-- retry_task, retry_failed, cancel_task. Payloads and results are not to be changed.
grant update (
  status, run_after, ready_at, attempts, claim_token, worker_id, started_at, finished_at, progress, progress_note, error_code, error
) on windlass.tasks to windlass_producer;
grant insert (code, reason, fleet, worker_id, task_id, detail) on windlass.events to windlass_producer;
-- cancel_task: what the worker's time was spent on, where that has a price.
grant insert on windlass.attempt_spans to windlass_producer;
grant select (id, slot, machine_id, price_micros_per_hour) on windlass.workers to windlass_producer;

grant select, update, delete on windlass.tasks to windlass_worker;
grant select, insert, update, delete on windlass.workers to windlass_worker;
-- The fleet a worker names comes into being with it.
grant select, insert on windlass.fleets to windlass_worker;
grant select, insert, delete on windlass.events to windlass_worker;
-- recover_lost_workers: who leads, and which slot a lost worker had.
grant select on windlass.leases to windlass_worker;
grant select, update on windlass.slots to windlass_worker;
-- sweep.
grant select, delete on windlass.cycles, windlass.logs to windlass_worker;
-- What its time was spent on, and sweep.
grant select, insert, delete on windlass.attempt_spans to windlass_worker;
grant select, delete on windlass.charges, windlass.spending to windlass_worker;
