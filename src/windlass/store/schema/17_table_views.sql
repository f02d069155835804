-- The tables as the control plane reads them: each has a view of its name in the schema windlass_internal. No role but
-- the owner has rights on the tables themselves (18_privileges.sql).
--
-- A view shows the columns that are listed here and no others: hashes of tokens and secrets and the tokens of claims
-- stay hidden, and so does a new column or table until this list names it.
--
-- A migration that shows a column replaces the list and calls create_table_views. Before it changes the type of a
-- column, or drops one, it drops the view.
create function windlass_internal.shown_columns() returns table (name text, columns text[])
language sql immutable
as $$
  select s.name, string_to_array(regexp_replace(s.columns, '\s', '', 'g'), ',')
  from (
    values
      (
        'adoptions',
        '
          name,table_schema,table_name,states,max_attempts,timeout_s,checksum,applied_at,backfill_after,
          backfilled,backfilled_at
        '
      ),
      ('alerts', 'id,fleet,key,code,severity,reason,since,seen_at,resolved_at'),
      ('attempt_spans', 'worker_id,task_id,queue,from_at,until_at'),
      ('caller_rates', 'server_id,kind,caller,rate,recorded_at'),
      ('charges', 'id,worker_id,fleet,task_id,queue,kind,from_at,until_at,amount_micros,currency'),
      ('clock', 'seen_at,judged_until,is_only'),
      ('counters', 'name,labels,value,updated_at'),
      ('cycle_requests', 'id,requested_at,summaries'),
      (
        'cycles',
        '
          id,fleet,term,started_at,finished_at,snapshot,plan,summary,decision,repeats,repeated_at,
          last_decision,is_change
        '
      ),
      ('deferred_rows', 'id,adoption,row_key,expected,reason,at,attempts,retry_at,is_rejected'),
      ('diagnostics', 'worker_id,at,diagnostics'),
      ('events', 'id,at,code,reason,fleet,worker_id,task_id,cycle_id,detail,actor'),
      (
        'fleets',
        '
          name,provider,queues,min_workers,max_workers,paused,created_at,planner_state,requested_workers,
          reset_at,restarted_at,deploy
        '
      ),
      ('instance', 'id,is_only'),
      ('leases', 'name,holder,term,expires_at,ttl_s'),
      ('logs', 'id,at,level,message,worker_id,cycle_id,fields'),
      (
        'machine_history',
        '
          id,fleet,requested_at,boot_s,cancelled_s,lived_s,is_refused,is_crashed,price_micros_per_hour,currency,
          billing_unit_s
        '
      ),
      ('messages', 'id,alert_id,notifier,kind,due_at,attempts,delivered_at,abandoned_at,error'),
      ('migrations', 'version,name,checksum,applied_at'),
      ('open_queues', 'queue,max_unfinished,max_payload_bytes'),
      ('processes', 'id,kind,number,host,pid,version,url,ray_head,gauges,started_at,seen_at'),
      (
        'retention',
        '
          complete_s,failed_s,events_s,cycles_s,logs_s,charges_s,worker_logs_s,worker_logs_bytes,
          worker_log_bytes,is_only
        '
      ),
      (
        'sample_averages',
        '
          fleet,at,queued,running,spawning,active,terminating,error,completed_per_minute,wait_p95_s,
          burn_micros_per_hour,currency
        '
      ),
      (
        'samples',
        '
          fleet,at,queued,running,spawning,active,terminating,error,completed_per_minute,wait_p95_s,
          burn_micros_per_hour,currency
        '
      ),
      ('sessions', 'is_link,role,name,created_at,expires_at'),
      (
        'slots',
        '
          fleet,slot,status,restart_count,last_restart_at,failed_at,failed_reason,created_at,
          needs_replacement,restarts
        '
      ),
      ('spending', 'fleet,hour,currency,queue,task_micros,boot_micros,idle_micros,tail_micros'),
      ('task_history', 'id,queue,base_at,until_at,tasks,arrivals_cs,durations_s'),
      (
        'tasks',
        '
          id,queue,status,priority,attempts,max_attempts,timeout_s,run_after,created_at,ready_at,started_at,
          finished_at,worker_id,unique_key,progress,progress_note,error_code,error,payload,
          result,owner,adoption
        '
      ),
      ('tokens', 'id,name,role,queues,fleets,created_at,created_by,expires_at,last_used_at,revoked_at'),
      ('volume_sizes', 'volume_id,fleet,size_gb,price_micros_per_hour,currency,from_at,until_at'),
      ('worker_log_totals', 'worker_id,stored_bytes,dropped_lines,deleted_lines,last_batch,minute_at,minute_bytes'),
      ('worker_logs', 'id,worker_id,task_id,attempt,source,at,ages_ms,body,lines,dropped_lines,size_bytes'),
      (
        'workers',
        '
          id,fleet,slot,status,paused,queues,kind,node,concurrency,lease_s,created_at,activated_at,
          last_heartbeat,heartbeat_gapless_since,first_claimed_at,terminating_at,terminated_at,failed_at,
          is_proven,code,reason,host,pid,start_id,version,fingerprint,late_results,late_event_at,failed_tasks,
          failing_since,metadata,provider,creation,machine_id,machine_created_at,machine_at,instance_type,
          place,address,machine_host,running_at,reachable_at,boot_step,boot_step_at,boot_steps,preparing_at,
          prepared_at,prepare_code,prepare_reason,host_key,vram_total_mb,vram_used_mb,vram_at,vram_lost_at,
          price_micros_per_hour,price_parts,currency,billing_unit_s,billed_since,billed_until,settled_until,
          settle_at,join_expires_at,joined_at,registered_by
        '
      )
  ) as s (name, columns)
$$;

create function windlass_internal.create_table_views() returns void
language plpgsql
as $$
declare
  v_table record;
begin
  for v_table in
    select s.name, (select string_agg(format('t.%I', c.name), ', ' order by c.position)
      from unnest(s.columns) with ordinality as c (name, position)) as columns
    from windlass_internal.shown_columns() as s
  loop
    execute format('drop view if exists windlass_internal.%I', v_table.name);
    execute format('create view windlass_internal.%I as select %s%s from windlass.%I t', v_table.name, v_table.columns,
      case v_table.name
        when 'leases' then ', windlass_internal.is_held(t) as is_held'
        when 'sessions' then ', left(encode(t.hash, ''hex''), 12) as id'
        else ''
      end,
      v_table.name);
  end loop;
end
$$;
select windlass_internal.create_table_views();
