-- Retention. Each kind of row has its own statement: the planner needs the literal status to use the partial index.

-- The times that a trusted caller last applied, at first those of a new configuration. Workers delete nothing younger,
-- whatever they ask for.
create table windlass.retention (
  complete_s double precision not null,
  failed_s double precision not null,
  events_s double precision not null,
  cycles_s double precision not null,
  logs_s double precision not null,
  charges_s double precision not null,
  -- Output of workers: its age, the bytes of all of it, and the bytes of one worker's.
  worker_logs_s double precision not null default 604800,
  worker_logs_bytes bigint not null default 1073741824,
  worker_log_bytes bigint not null default 16777216,
  is_only boolean primary key default true check (is_only)
);
insert into windlass.retention (complete_s, failed_s, events_s, cycles_s, logs_s, charges_s)
values (604800, 2592000, 2592000, 172800, 259200, 34560000);

-- Delete rows older than their limit, at most p_limit of each kind, oldest first. Returns the number of deleted rows; a
-- caller repeats while it is p_limit or more. Runs once at a time: a second caller returns at once.
create function windlass.sweep(
  p_complete_s double precision,
  p_failed_s double precision,
  p_events_s double precision,
  p_cycles_s double precision,
  p_logs_s double precision,
  p_charges_s double precision,
  p_limit integer default 1000
) returns integer
language plpgsql
set enable_seqscan = off
as $$
declare
  v_now timestamptz := windlass.now();
  v_deleted integer := 0;
  v_count integer;
begin
  perform windlass_internal.check_settings();
  if not pg_try_advisory_xact_lock(hashtext('windlass.sweep')) then
    return 0;
  end if;
  p_limit := least(p_limit, 10000);
  if windlass_internal.is_trusted() then
    update windlass.retention r
    set complete_s = p_complete_s, failed_s = p_failed_s, events_s = p_events_s, cycles_s = p_cycles_s,
        logs_s = p_logs_s, charges_s = p_charges_s
    where (r.complete_s, r.failed_s, r.events_s, r.cycles_s, r.logs_s, r.charges_s)
      <> (p_complete_s, p_failed_s, p_events_s, p_cycles_s, p_logs_s, p_charges_s);
  else
    select greatest(p_complete_s, r.complete_s), greatest(p_failed_s, r.failed_s), greatest(p_events_s, r.events_s),
      greatest(p_cycles_s, r.cycles_s), greatest(p_logs_s, r.logs_s), greatest(p_charges_s, r.charges_s)
    into p_complete_s, p_failed_s, p_events_s, p_cycles_s, p_logs_s, p_charges_s
    from windlass.retention r;
  end if;

  delete from windlass.tasks where id = any (array(
    select t.id from windlass.tasks t
    where t.status = 'complete' and t.finished_at < v_now - make_interval(secs => p_complete_s)
      and not windlass_internal.is_deferred(t.adoption, t.unique_key)
    order by t.finished_at limit p_limit for update skip locked
  ));
  get diagnostics v_count = row_count;
  v_deleted := v_deleted + v_count;

  delete from windlass.tasks where id = any (array(
    select t.id from windlass.tasks t
    where t.status = 'failed' and t.finished_at < v_now - make_interval(secs => p_failed_s)
      and not windlass_internal.is_deferred(t.adoption, t.unique_key)
    order by t.finished_at limit p_limit for update skip locked
  ));
  get diagnostics v_count = row_count;
  v_deleted := v_deleted + v_count;

  delete from windlass.events where id = any (array(
    select e.id from windlass.events e where e.at < v_now - make_interval(secs => p_events_s)
    order by e.at limit p_limit
  ));
  get diagnostics v_count = row_count;
  v_deleted := v_deleted + v_count;

  delete from windlass.cycles where id = any (array(
    select c.id from windlass.cycles c where c.started_at < v_now - make_interval(secs => p_cycles_s)
    order by c.started_at limit p_limit
  ));
  get diagnostics v_count = row_count;
  v_deleted := v_deleted + v_count;

  delete from windlass.logs where id = any (array(
    select l.id from windlass.logs l where l.at < v_now - make_interval(secs => p_logs_s) order by l.at limit p_limit
  ));
  get diagnostics v_count = row_count;
  v_deleted := v_deleted + v_count;

  delete from windlass.charges where id = any (array(
    select c.id from windlass.charges c where c.from_at < v_now - make_interval(secs => p_charges_s)
    order by c.from_at limit p_limit
  ));
  get diagnostics v_count = row_count;
  v_deleted := v_deleted + v_count;

  delete from windlass.spending where (fleet, hour, currency, queue) in (
    select s.fleet, s.hour, s.currency, s.queue from windlass.spending s
    where s.hour < v_now - make_interval(secs => p_charges_s)
    order by s.hour limit p_limit
  );
  get diagnostics v_count = row_count;
  v_deleted := v_deleted + v_count;

  -- Settling deletes spans. The rest belongs to workers that turned out to have no price.
  delete from windlass.attempt_spans where (worker_id, from_at, task_id) in (
    select s.worker_id, s.from_at, s.task_id from windlass.attempt_spans s
    where s.until_at < v_now - make_interval(secs => greatest(p_complete_s, p_failed_s))
      and not exists (select from windlass.workers w where w.id = s.worker_id and w.settle_at is not null)
    order by s.until_at limit p_limit
  );
  get diagnostics v_count = row_count;
  v_deleted := v_deleted + v_count;

  -- Terminated workers are kept as long as the tasks and events that name them.
  delete from windlass.workers where id = any (array(
    select w.id from windlass.workers w
    where w.status = 'terminated'
      and w.terminated_at < v_now - make_interval(secs => greatest(p_complete_s, p_failed_s, p_events_s))
      -- A worker is kept until its bill is closed.
      and w.settle_at is null
    order by w.terminated_at limit p_limit
  ));
  get diagnostics v_count = row_count;
  return v_deleted + v_count + windlass_internal.delete_old_logs(p_limit);
end
$$;

-- Delete resolved alerts and their messages. Returns the number of deleted alerts, at most p_limit.
create function windlass_internal.sweep_alerts(p_alerts_s double precision, p_limit integer default 1000)
returns integer
language sql
set enable_seqscan = off
as $$
  with deleted as (
    delete from windlass.alerts where id = any (array(
      select a.id from windlass.alerts a
      where a.resolved_at < windlass.now() - make_interval(secs => p_alerts_s)
      order by a.resolved_at limit p_limit
    ))
    returning id
  )
  select count(*)::integer from deleted
$$;

-- Delete samples, their averages, expired sessions, processes that ended without removing their row, counters of former
-- fleets, and old requests for cycles. Returns the number of deleted rows.
create function windlass_internal.sweep_dashboard(
  p_samples_s double precision, p_averages_s double precision, p_limit integer default 1000
) returns integer
language plpgsql
set enable_seqscan = off
as $$
declare
  v_now timestamptz := windlass.now();
  v_deleted integer := 0;
  v_count integer;
begin
  delete from windlass.samples s using (
    select o.fleet, o.at from windlass.samples o
    where o.at < v_now - make_interval(secs => p_samples_s)
    order by o.at limit p_limit
  ) as old
  where s.fleet = old.fleet and s.at = old.at;
  get diagnostics v_count = row_count;
  v_deleted := v_deleted + v_count;

  delete from windlass.sample_averages a using (
    select o.fleet, o.at from windlass.sample_averages o
    where o.at < v_now - make_interval(secs => p_averages_s)
    order by o.at limit p_limit
  ) as old
  where a.fleet = old.fleet and a.at = old.at;
  get diagnostics v_count = row_count;
  v_deleted := v_deleted + v_count;

  delete from windlass.sessions where expires_at <= v_now;
  get diagnostics v_count = row_count;
  v_deleted := v_deleted + v_count;

  -- Processes that ended without removing their row.
  delete from windlass.processes where seen_at < v_now - interval '1 hour';
  get diagnostics v_count = row_count;
  v_deleted := v_deleted + v_count;

  delete from windlass.counters where updated_at < v_now - interval '90 days';
  get diagnostics v_count = row_count;
  v_deleted := v_deleted + v_count;

  delete from windlass.cycle_requests where requested_at < v_now - interval '1 hour';
  get diagnostics v_count = row_count;
  return v_deleted + v_count;
end
$$;
