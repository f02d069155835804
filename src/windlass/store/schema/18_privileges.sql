-- Who may do what. The whole access model is in this file; docs/security.md shows it as a table.
--
-- PUBLIC gets nothing, no role but the owner has a right on a table, and row-level security without a policy hides
-- every row. The functions and views below are the only way in: they run with the rights of the schema's owner,
-- functions with a search_path of their own. Functions and views that this file does not name are closed to all roles
-- but the owner.

-- The functions and views of each role, by name.
--   orchestrator  `windlass up`, the HTTP server, operators with the command line
--   producer      programs that enqueue; Supabase's service_role
--   worker        workers that connect to the database
--   viewer        people and monitoring
--   end_user      Supabase's authenticated
create function windlass_internal.rights() returns table (role text, object text)
language sql immutable
as $$
  select r.name, o.name
  from (
    values
      ('{orchestrator,producer,worker,viewer,end_user}'::text[], '{windlass.now}'::text[]),
      ('{orchestrator,producer,worker,viewer}', '{windlass.contract_versions,windlass.schema_history}'),
      (
        '{orchestrator,producer}',
        '{
          windlass.enqueue,windlass.enqueue_many,windlass.is_new_task,windlass.retry_task,windlass.retry_failed,
          windlass.cancel_task,windlass.task_details
        }'
      ),
      (
        '{orchestrator,worker}',
        '{
          windlass.register_worker,windlass.activate_worker,windlass.heartbeat,windlass.deregister_worker,
          windlass.claim_task,windlass.claim_tasks,windlass.finish_and_claim,windlass.complete_task,windlass.fail_task,
          windlass.release_task,windlass.next_run_after,windlass.recover_lost_workers,windlass.sweep,
          windlass.append_logs,windlass.settle_rows
        }'
      ),
      ('{orchestrator,producer,viewer}', '{windlass.queue_depth}'),
      (
        '{orchestrator,viewer}',
        '{
          windlass.orchestrator_status,windlass.active_workers_health,windlass.boot_phases,windlass.boot_times,
          windlass.machine_hosts,windlass.worker_performance,windlass.recent_errors,windlass.cost_estimates,windlass.daily_costs,
          windlass.task_costs,windlass.health,windlass.worker_counts,windlass.terminations,windlass.processing_rate,
          windlass_internal.component_name
        }'
      ),
      -- What handlers print may quote payloads.
      ('{orchestrator}', '{windlass.worker_log_lines,windlass.worker_diagnostics}'),
      ('{end_user}', '{windlass.submit_task,windlass.my_tasks}'),
      (
        '{orchestrator}',
        '{
          windlass_internal.abort_deploy,windlass_internal.acquire_lease,windlass_internal.add_counters,windlass_internal.add_logs,
          windlass_internal.add_samples,windlass_internal.answer_cycle_requests,windlass_internal.authenticate,
          windlass_internal.backfill_rows,windlass_internal.compare_rows,windlass_internal.defer_differences,
          windlass_internal.claim_messages,windlass_internal.commit_plan,windlass_internal.create_link,
          windlass_internal.create_session,windlass_internal.create_token,windlass_internal.drain_workers,
          windlass_internal.end_session,windlass_internal.exchange_join_token,windlass_internal.find_session,
          windlass_internal.instance_id,windlass_internal.is_held,windlass_internal.is_name,
          windlass_internal.mark_message_delivered,windlass_internal.mark_message_failed,windlass_internal.matches_error,
          windlass_internal.matches_search,windlass_internal.observe,windlass_internal.record_volume,
          windlass_internal.open_accounts,windlass_internal.open_session,windlass_internal.pause_fleet,
          windlass_internal.pause_workers,
          windlass_internal.place_tasks,windlass_internal.purge_tasks,windlass_internal.record_alerts,
          windlass_internal.record_boot_log,
          windlass_internal.record_heartbeats,windlass_internal.record_outcomes,windlass_internal.record_process,
          windlass_internal.release_lease,windlass_internal.release_leases,windlass_internal.remove_process,
          windlass_internal.report_boot_step,windlass_internal.report_nodes,windlass_internal.report_start_failure,
          windlass_internal.read_machine_history,windlass_internal.read_task_history,
          windlass_internal.request_cycle,windlass_internal.request_deploy,windlass_internal.request_workers,
          windlass_internal.restart_slots,windlass_internal.revoke_session,windlass_internal.revoke_token,
          windlass_internal.self_register_worker,windlass_internal.settle_accounts,windlass_internal.settle_rows,
          windlass_internal.share_rates,
          windlass_internal.sweep_alerts,windlass_internal.sweep_dashboard,windlass_internal.sweep_history,
          windlass_internal.take_over_nodes,windlass_internal.terminate_worker,
          windlass_internal.withdraw_cycle_request,windlass_internal.sweep_worker_logs
        }'
      )
  ) as g (roles, objects)
  cross join unnest(g.roles) as r (name)
  cross join unnest(g.objects) as o (name)
$$;

-- Functions of these roles that need no rights of the owner: PostgreSQL can put them into the caller's query.
create function windlass_internal.is_plain(p_function text) returns boolean
language sql immutable
as $$
  select p_function = any ('{
    windlass.now,windlass.contract_versions,windlass.claim_task,windlass.claim_tasks,windlass_internal.is_held,
    windlass_internal.is_name,windlass_internal.matches_error,windlass_internal.matches_search
  }'::text[])
$$;

-- Close all objects of the schemas to PUBLIC, hide all rows, and give the functions of roles the owner's rights. After
-- the schema and after every migration: a new function or table begins with PostgreSQL's open defaults.
create function windlass_internal.secure_objects() returns void
language plpgsql
as $$
declare
  v_name text;
begin
  revoke all on schema windlass, windlass_internal from public;
  revoke execute on all functions in schema windlass, windlass_internal from public;
  revoke all on all tables in schema windlass, windlass_internal from public;
  -- Only what is missing: the statement locks the whole table.
  for v_name in
    select format('windlass.%I', t.tablename) from pg_tables t where t.schemaname = 'windlass' and not t.rowsecurity
  loop
    execute format('alter table %s enable row level security', v_name);
  end loop;
  for v_name in
    select f.oid::regprocedure from pg_proc f
    join pg_namespace n on n.oid = f.pronamespace
    join (select distinct r.object from windlass_internal.rights() r) as r on r.object = format('%s.%s', n.nspname, f.proname)
    where not windlass_internal.is_plain(r.object)
      and not (f.prosecdef and coalesce('search_path=pg_catalog, pg_temp' = any (f.proconfig), false))
  loop
    execute format('alter function %s security definer', v_name);
    execute format('alter function %s set search_path = pg_catalog, pg_temp', v_name);
  end loop;
end
$$;

-- Give the roles that exist in this database server exactly these rights, and Supabase's roles theirs. The owner calls
-- it (`windlass db roles`, and every migration after that); it may be repeated.
create function windlass_internal.apply_roles() returns void
language plpgsql
as $$
declare
  v_role record;
  v_object text;
begin
  perform windlass_internal.secure_objects();
  for v_role in
    select n.kind, n.name
    from (
      values
        ('orchestrator', 'windlass_orchestrator'), ('producer', 'windlass_producer'), ('worker', 'windlass_worker'),
        ('viewer', 'windlass_viewer'), ('producer', 'service_role'), ('end_user', 'authenticated'), (null, 'anon')
    ) as n (kind, name)
    join pg_roles r on r.rolname = n.name
  loop
    execute format('revoke all on schema windlass, windlass_internal from %I', v_role.name);
    execute format('revoke all on all tables in schema windlass, windlass_internal from %I', v_role.name);
    execute format('revoke all on all functions in schema windlass, windlass_internal from %I', v_role.name);
    continue when v_role.kind is null;
    execute format('grant usage on schema windlass to %I', v_role.name);
    for v_object in select r.object from windlass_internal.rights() r where r.role = v_role.kind loop
      if to_regclass(v_object) is not null then
        execute format('grant select on %s to %I', v_object, v_role.name);
      else
        execute format('grant execute on function %s to %I', v_object, v_role.name);
      end if;
    end loop;
    if v_role.kind = 'orchestrator' then
      -- The schema of internal functions is what makes a caller trusted (03_callers.sql).
      grant usage on schema windlass_internal to windlass_orchestrator;
      for v_object in
        select format('windlass_internal.%I', s.name) from windlass_internal.shown_columns() as s
      loop
        execute format('grant select on %s to windlass_orchestrator', v_object);
      end loop;
    end if;
  end loop;
end
$$;

select windlass_internal.secure_objects();
