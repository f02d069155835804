-- What the processes of `windlass up` and `serve` write about themselves: their records, counters, requested cycles,
-- log lines, samples for charts, and deliveries that failed.

-- Each process every few seconds; primary key.
create function windlass_internal.record_process(
  p_id uuid,
  p_kind text,
  p_number integer,
  p_host text,
  p_pid integer,
  p_version text,
  p_url text,
  p_ray_head jsonb,
  p_gauges jsonb
) returns void
language sql
as $$
  insert into windlass.processes as p (id, kind, number, host, pid, version, url, ray_head, gauges)
  values (p_id, p_kind, p_number, p_host, p_pid, p_version, p_url, p_ray_head, p_gauges)
  on conflict (id) do update
    set url = excluded.url, ray_head = excluded.ray_head, gauges = excluded.gauges, seen_at = excluded.seen_at
$$;

-- A process that stops, and the successor of one that died; primary key.
create function windlass_internal.remove_process(p_id uuid) returns void
language sql
as $$
  delete from windlass.processes where id = p_id
$$;

-- Each process every few seconds; primary key. In the order of the key, so that two processes never wait for each
-- other.
create function windlass_internal.add_counters(p_counters jsonb) returns void
language sql
as $$
  insert into windlass.counters as c (name, labels, value)
  select a.name, array(select jsonb_array_elements_text(a.labels)) as labels, a.value
  from jsonb_to_recordset(p_counters) as a (name text, labels jsonb, value double precision)
  order by a.name, array(select jsonb_array_elements_text(a.labels))
  on conflict (name, labels) do update
    set value = c.value + excluded.value, updated_at = excluded.updated_at
$$;

-- `POST /internal/cycle`; cycle_requests_open. Null if p_limit requests are open that are younger than p_ttl_s.
create function windlass_internal.request_cycle(p_limit integer, p_ttl_s double precision) returns bigint
language plpgsql
as $$
declare
  v_id bigint;
begin
  insert into windlass.cycle_requests (summaries)
  select null
  where (
    select count(*) from windlass.cycle_requests o
    where o.summaries is null and o.requested_at > windlass.now() - make_interval(secs => p_ttl_s)
  ) < p_limit
  returning id into v_id;
  if v_id is not null then
    perform pg_notify('windlass_cycle_requests', '');
  end if;
  return v_id;
end
$$;

-- `POST /internal/cycle` after its answer, or without one; primary key.
create function windlass_internal.withdraw_cycle_request(p_id bigint) returns void
language sql
as $$
  delete from windlass.cycle_requests where id = p_id
$$;

-- Control processes; primary key.
create function windlass_internal.answer_cycle_requests(p_ids bigint[], p_summaries jsonb) returns void
language sql
as $$
  update windlass.cycle_requests set summaries = p_summaries
  where id = any (p_ids) and summaries is null
$$;

-- A batch of log lines (`logs.in_database`).
create function windlass_internal.add_logs(p_lines jsonb) returns void
language sql
as $$
  insert into windlass.logs (at, level, message, worker_id, cycle_id, fields)
  select coalesce(l.at, windlass.now()), l.level, l.message, l.worker_id, l.cycle_id, l.fields
  from jsonb_to_recordset(p_lines) as l (
    at timestamptz, level text, message text, worker_id text, cycle_id bigint, fields jsonb
  )
$$;

-- One row per fleet and interval, the first writer wins; then averages of the last hour's intervals of five minutes
-- that have ended. Indexes samples_at, sample_averages_at.
create function windlass_internal.add_samples(p_samples jsonb, p_interval_s double precision) returns void
language sql
set enable_seqscan = off
as $$
  insert into windlass.samples (
    at, fleet, queued, running, spawning, active, terminating, error, completed_per_minute, wait_p95_s,
    burn_micros_per_hour, currency
  )
  select date_bin(make_interval(secs => p_interval_s), windlass.now(), 'epoch'), s.*
  from jsonb_to_recordset(p_samples) as s (
    fleet text, queued integer, running integer, spawning integer, active integer, terminating integer, error integer,
    completed_per_minute real, wait_p95_s real, burn_micros_per_hour bigint, currency text
  )
  on conflict do nothing;

  insert into windlass.sample_averages (
    fleet, at, queued, running, spawning, active, terminating, error, completed_per_minute, wait_p95_s,
    burn_micros_per_hour, currency
  )
  select
    s.fleet, date_bin('5 minutes', s.at, 'epoch'), avg(s.queued), avg(s.running), avg(s.spawning), avg(s.active),
    avg(s.terminating), avg(s.error), avg(s.completed_per_minute), max(s.wait_p95_s), avg(s.burn_micros_per_hour),
    max(s.currency)
  from windlass.samples s
  where s.at < date_bin('5 minutes', windlass.now(), 'epoch')
    and s.at >= greatest(
      date_bin('5 minutes', windlass.now() - interval '1 hour', 'epoch'),
      (select max(a.at) + interval '5 minutes' from windlass.sample_averages a)
    )
  group by 1, 2
  on conflict do nothing
$$;

-- A message that was abandoned while it was being sent stays abandoned. p_retry_in_s null: it is not sent again.
create function windlass_internal.mark_message_failed(p_id bigint, p_error text, p_retry_in_s double precision)
returns void
language sql
as $$
  update windlass.messages
  set error = p_error,
      due_at = coalesce(windlass.now() + make_interval(secs => p_retry_in_s), due_at),
      abandoned_at = coalesce(abandoned_at, case when p_retry_in_s is null then windlass.now() end)
  where id = p_id
$$;
