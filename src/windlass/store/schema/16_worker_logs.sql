-- What workers and their handlers print, and what is known about a worker at its end. Both outlive the machine.
--
-- Workers send their output in chunks of lines, masked by them (append_logs). Lines are kept as text: the database
-- compresses long values, and SQL can read them. Three bounds hold whatever a worker sends: bytes per minute, bytes per
-- worker (its oldest lines are deleted), and age and bytes of the whole table (retention).

create table windlass.worker_logs (
  id bigint generated always as identity primary key,
  worker_id text not null references windlass.workers (id) on delete cascade,
  -- The attempt that printed the lines. Null: the worker itself.
  task_id bigint,
  attempt integer,
  -- boot: printed before the worker's program ran, reported by the machine or read from the provider.
  source text not null default 'worker' check (source in ('worker', 'boot')),
  -- When the chunk arrived. `ages_ms` says for each line how many milliseconds earlier it was printed, so that the
  -- clocks of rented machines do not matter.
  at timestamptz not null,
  ages_ms integer[] not null,
  -- Lines, separated by line feeds.
  body text not null,
  lines integer not null,
  -- Lines before these that the worker did not send: it printed more than its limits allow.
  dropped_lines bigint not null default 0,
  -- Of the body and the ages, plus 64 for the row.
  size_bytes integer not null
);
create index worker_logs_worker on windlass.worker_logs (worker_id, id);
create index worker_logs_task on windlass.worker_logs (task_id, id) where task_id is not null;
create index worker_logs_at on windlass.worker_logs (at);
-- At most one report of a machine's boot per worker: the next one replaces it.
create unique index worker_logs_boot on windlass.worker_logs (worker_id) where source = 'boot';

-- One row per worker with output.
create table windlass.worker_log_totals (
  worker_id text primary key references windlass.workers (id) on delete cascade,
  stored_bytes bigint not null default 0,
  -- Lines that were not sent or not accepted, and lines that were deleted because of the limits.
  dropped_lines bigint not null default 0,
  deleted_lines bigint not null default 0,
  -- The last accepted batch: a worker repeats a call whose answer was lost.
  last_batch uuid,
  -- Bytes accepted since minute_at.
  minute_at timestamptz not null default windlass.now(),
  minute_bytes bigint not null default 0
);

-- What is known about a worker at its end, in addition to its row: `metadata.diagnostics` in the API and the command
-- line. Not in workers.metadata, which is limited to 4 KiB because every list reads it.
create table windlass.diagnostics (
  worker_id text primary key references windlass.workers (id) on delete cascade,
  at timestamptz not null,
  diagnostics jsonb not null check (octet_length(diagnostics::text) <= 16384)
);

-- A worker has sent output: an array of at most 200 chunks {"lines", "ages_ms", "task_id", "attempt", "dropped"} and
-- one megabyte. p_batch_id is new for every batch and the same for a repeated call, which changes nothing. Lines of an
-- attempt that the worker never had are stored as the worker's own. A dispatcher sends the output of attempts on its
-- nodes, which is stored as that of their nodes. Returns the number of stored lines.
--
-- A number of dropped lines is cut to a billion per chunk, so that no sum of them overflows.
create function windlass.append_logs(
  p_worker_id text, p_batch_id uuid, p_chunks jsonb, p_secret text default null
) returns integer
language plpgsql
as $$
declare
  v_now timestamptz := windlass.now();
  v_totals windlass.worker_log_totals;
  v_max_worker_bytes bigint;
  v_stored_bytes bigint;
  v_lines integer := 0;
  v_dropped bigint;
  v_part record;
begin
  perform windlass_internal.check_worker(p_worker_id, p_secret);
  if not exists (select from windlass.workers w where w.id = p_worker_id and w.status <> 'terminated') then
    raise exception 'worker % has terminated or is not registered: register it first', p_worker_id
      using errcode = 'no_data_found';
  end if;
  if jsonb_typeof(p_chunks) is distinct from 'array' then
    raise exception 'chunks must be an array' using errcode = 'invalid_parameter_value';
  end if;
  if jsonb_array_length(p_chunks) > 200 or octet_length(p_chunks::text) > 1048576 then
    raise exception 'at most 200 chunks and 1,048,576 bytes of output are accepted in one call'
      using errcode = 'program_limit_exceeded';
  end if;

  -- Calls of one worker run one after the other. Not by its row of totals: rows of several workers are locked below, in
  -- the order of their ids, as retention does.
  perform pg_advisory_xact_lock(hashtext('windlass.append_logs'), hashtext(p_worker_id));
  insert into windlass.worker_log_totals (worker_id, minute_at) values (p_worker_id, v_now) on conflict do nothing;
  select t.* into v_totals from windlass.worker_log_totals t where t.worker_id = p_worker_id;
  if v_totals.last_batch = p_batch_id then
    return 0;
  end if;
  if v_now >= v_totals.minute_at + interval '1 minute' then
    v_totals.minute_at := v_now;
    v_totals.minute_bytes := 0;
  end if;

  -- A worker that keeps to its own limits sends far less than 16 MiB per minute.
  if v_totals.minute_bytes + octet_length(p_chunks::text) > 16777216 then
    select coalesce(sum(jsonb_array_length(c -> 'lines') + least(1000000000, greatest(0, (c ->> 'dropped')::bigint))), 0)
    into v_dropped
    from jsonb_array_elements(p_chunks) as c;
    update windlass.worker_log_totals t
    set dropped_lines = t.dropped_lines + v_dropped, last_batch = p_batch_id, minute_at = v_totals.minute_at,
        minute_bytes = v_totals.minute_bytes
    where t.worker_id = p_worker_id;
  else
    select r.worker_log_bytes into v_max_worker_bytes from windlass.retention r;
    for v_part in
    with sent as (
      select
        c.place, (c.chunk ->> 'task_id')::bigint as task_id, (c.chunk ->> 'attempt')::integer as attempt,
        least(1000000000, greatest(0, (c.chunk ->> 'dropped')::bigint)) as dropped, l.body, l.lines, l.ages_ms
      from jsonb_array_elements(p_chunks) with ordinality as c (chunk, place)
      cross join lateral (
        select
          coalesce(string_agg(replace(e.line, E'\n', ' '), E'\n' order by e.n), '') as body,
          count(*)::integer as lines,
          coalesce(
            array_agg(
              least(2147483647, greatest(0, coalesce((c.chunk -> 'ages_ms' ->> (e.n - 1)::integer)::bigint, 0)))::integer
              order by e.n
            ),
            '{}'
          ) as ages_ms
        from jsonb_array_elements_text(c.chunk -> 'lines') with ordinality as e (line, n)
      ) as l
    ),
    stored as (
      insert into windlass.worker_logs (worker_id, task_id, attempt, at, ages_ms, body, lines, dropped_lines, size_bytes)
      select
        coalesce(h.worker_id, p_worker_id), case when h.worker_id is not null then s.task_id end,
        case when h.worker_id is not null then s.attempt end, v_now, s.ages_ms, s.body, s.lines, s.dropped,
        octet_length(s.body) + 4 * s.lines + 64
      from sent s
      left join lateral (
        select a.worker_id
        from (
          select t.worker_id from windlass.tasks t where t.id = s.task_id
          union all
          -- An earlier attempt: its end is an event. A late result is no proof: any worker can report one.
          (
            select e.worker_id from windlass.events e
            where e.task_id = s.task_id and e.worker_id is not null and e.code <> 'LATE_RESULT'
            order by e.id desc limit 50
          )
        ) as a
        where windlass_internal.acts_for(p_worker_id, a.worker_id)
        limit 1
      ) as h on true
      order by s.place
      returning worker_id, lines, dropped_lines, size_bytes
    )
    select
      w.id as worker_id, coalesce(sum(s.size_bytes), 0) as bytes, coalesce(sum(s.lines), 0) as lines,
      coalesce(sum(s.dropped_lines), 0) as dropped, sum(sum(s.size_bytes)) over () as batch_bytes
    from (select p_worker_id as id union select o.worker_id from stored o) as w
    left join stored s on s.worker_id = w.id
    group by w.id order by w.id
    loop
      v_lines := v_lines + v_part.lines;
      insert into windlass.worker_log_totals (worker_id, minute_at) values (v_part.worker_id, v_now)
      on conflict do nothing;
      update windlass.worker_log_totals t
      set stored_bytes = t.stored_bytes + v_part.bytes, dropped_lines = t.dropped_lines + v_part.dropped
      where t.worker_id = v_part.worker_id
      returning t.stored_bytes into v_stored_bytes;
      if v_part.worker_id = p_worker_id then
        update windlass.worker_log_totals t
        set last_batch = p_batch_id, minute_at = v_totals.minute_at,
            minute_bytes = v_totals.minute_bytes + coalesce(v_part.batch_bytes, 0)
        where t.worker_id = p_worker_id;
      end if;
      if v_stored_bytes > v_max_worker_bytes then
        perform windlass_internal.trim_worker_logs(v_part.worker_id, (v_max_worker_bytes * 0.9)::bigint);
      end if;
    end loop;
  end if;
  return v_lines;
end
$$;

-- Rows of worker_logs were deleted, or their worker has too many.
create function windlass_internal.count_deleted_logs(p_worker_id text, p_bytes bigint, p_lines bigint) returns void
language sql
as $$
  update windlass.worker_log_totals
  set stored_bytes = greatest(0, stored_bytes - p_bytes), deleted_lines = deleted_lines + p_lines
  where worker_id = p_worker_id
$$;

-- Delete the oldest output of a worker until at most p_bytes are left. Its boot is kept. Rows that retention deletes at
-- the same time are skipped: waiting for them could end in a deadlock.
create function windlass_internal.trim_worker_logs(p_worker_id text, p_bytes bigint) returns void
language sql
as $$
  with ranked as (
    select l.id, sum(l.size_bytes) over (order by l.id desc) as bytes
    from windlass.worker_logs l where l.worker_id = p_worker_id and l.source = 'worker'
  ),
  old as (
    select l.id from windlass.worker_logs l join ranked r on r.id = l.id
    where r.bytes > p_bytes for update of l skip locked
  ),
  deleted as (
    delete from windlass.worker_logs l using old o where l.id = o.id returning l.size_bytes, l.lines
  )
  select windlass_internal.count_deleted_logs(p_worker_id, d.bytes, d.lines)
  from (select sum(size_bytes)::bigint as bytes, sum(lines)::bigint as lines from deleted) as d
  where d.bytes is not null
$$;

-- The output of a machine that has not joined yet: its last lines, which replace those of an earlier report. Without
-- effect once its worker sent a heartbeat or has terminated.
create function windlass_internal.record_boot_log(p_worker_id text, p_body text) returns void
language plpgsql
as $$
declare
  v_body text := right(p_body, 32768);
begin
  if not exists (
    select from windlass.workers w
    where w.id = p_worker_id and w.status <> 'terminated' and w.last_heartbeat is null
  ) or coalesce(v_body, '') = '' then
    return;
  end if;
  insert into windlass.worker_logs as l (worker_id, source, at, ages_ms, body, lines, size_bytes)
  select p_worker_id, 'boot', windlass.now(), array_fill(0, array[n.lines]), v_body, n.lines, octet_length(v_body) + 4 * n.lines + 64
  from (select cardinality(string_to_array(v_body, E'\n')) as lines) as n
  on conflict (worker_id) where source = 'boot' do update
    set at = excluded.at, ages_ms = excluded.ages_ms, body = excluded.body, lines = excluded.lines,
        size_bytes = excluded.size_bytes;
end
$$;

-- Delete output that is older than its retention, and the oldest output beyond the bytes of the whole table; at most
-- p_limit rows of each. Returns the number of deleted rows. Output of a boot is deleted too, and not in the totals: it
-- is at most 32,768 characters per worker.
create function windlass_internal.delete_old_logs(p_limit integer) returns integer
language plpgsql
set enable_seqscan = off
as $$
declare
  v_kept windlass.retention;
  v_excess bigint;
  v_deleted integer := 0;
  v_worker_id text;
  v_bytes bigint;
  v_lines bigint;
  v_rows integer;
begin
  select r.* into v_kept from windlass.retention r;
  select coalesce(sum(t.stored_bytes), 0) - v_kept.worker_logs_bytes into v_excess from windlass.worker_log_totals t;
  for v_worker_id, v_bytes, v_lines, v_rows in
    with oldest as (
      select l.id, l.at, sum(l.size_bytes) over (order by l.at, l.id) - l.size_bytes as older_bytes
      from (
        select o.id, o.at, o.size_bytes from windlass.worker_logs o order by o.at, o.id limit p_limit
      ) as l
    ),
    old as (
      select l.id from windlass.worker_logs l join oldest o on o.id = l.id
      where o.at < windlass.now() - make_interval(secs => v_kept.worker_logs_s) or o.older_bytes < v_excess
      for update of l skip locked
    ),
    deleted as (
      delete from windlass.worker_logs l using old o where l.id = o.id
      returning l.worker_id, l.size_bytes, l.lines, l.source
    )
    select
      d.worker_id,
      coalesce(sum(d.size_bytes) filter (where d.source = 'worker'), 0),
      coalesce(sum(d.lines) filter (where d.source = 'worker'), 0),
      count(*)
    from deleted d
    group by d.worker_id
    order by d.worker_id
  loop
    perform windlass_internal.count_deleted_logs(v_worker_id, v_bytes, v_lines);
    v_deleted := v_deleted + v_rows;
  end loop;
  return v_deleted;
end
$$;

-- Set the limits of workers' output, and apply them.
create function windlass_internal.sweep_worker_logs(
  p_age_s double precision, p_bytes bigint, p_worker_bytes bigint, p_limit integer default 1000
) returns integer
language plpgsql
as $$
begin
  update windlass.retention r
  set worker_logs_s = p_age_s, worker_logs_bytes = p_bytes, worker_log_bytes = p_worker_bytes
  where (r.worker_logs_s, r.worker_logs_bytes, r.worker_log_bytes) <> (p_age_s, p_bytes, p_worker_bytes);
  return windlass_internal.delete_old_logs(p_limit);
end
$$;

-- The last lines of a worker, oldest first, at most p_lines and 3,000 characters, without control characters.
create function windlass_internal.last_log_lines(p_worker_id text, p_lines integer) returns text[]
language sql stable
as $$
  select coalesce(array_agg(l.line order by l.n), '{}')
  from (
    select s.line, s.n, sum(length(s.line)) over (order by s.n desc) as characters
    from (
      select regexp_replace(left(e.line, 500), '[[:cntrl:]]', '', 'g') as line,
        row_number() over (order by c.id, e.place) as n, row_number() over (order by c.id desc, e.place desc) as from_end
      from (
        select o.id, o.body from windlass.worker_logs o
        where o.worker_id = p_worker_id and o.lines > 0 order by o.id desc limit p_lines
      ) as c
      cross join lateral unnest(string_to_array(c.body, E'\n')) with ordinality as e (line, place)
    ) as s
    where s.from_end <= p_lines
  ) as l
  where l.characters <= 3000
$$;

-- A worker failed or was terminated: keep what is known about it.
create function windlass_internal.record_diagnostics() returns trigger
language plpgsql
as $$
declare
  v_diagnostics jsonb;
begin
  v_diagnostics := jsonb_strip_nulls(jsonb_build_object(
    'code', new.code,
    'reason', left(new.reason, 2000),
    'status_before', old.status,
    'last_heartbeat', new.last_heartbeat,
    'vitals', nullif(new.metadata, '{}'::jsonb),
    'gpu', case when new.vram_at is not null then
      jsonb_build_object('vram_total_mb', new.vram_total_mb, 'vram_used_mb', new.vram_used_mb, 'at', new.vram_at) end,
    'boot', nullif(jsonb_strip_nulls(jsonb_build_object(
      'running_at', new.running_at, 'reachable_at', new.reachable_at, 'joined_at', new.joined_at,
      'first_claimed_at', new.first_claimed_at, 'steps', nullif(new.boot_steps, '[]'::jsonb)
    )), '{}'::jsonb),
    'preparation', case when new.prepare_code is not null then
      jsonb_build_object('code', new.prepare_code, 'output', left(new.prepare_reason, 2000)) end,
    -- The last attempt that failed on it. Without its text, which may contain parts of a payload.
    'last_error', (
      select jsonb_build_object(
        'code', e.detail ->> 'error_code', 'task_id', e.task_id, 'attempt', e.detail -> 'attempt', 'at', e.at)
      from (
        select v.* from windlass.events v where v.worker_id = new.id order by v.id desc limit 200
      ) as e
      where e.code in ('TASK_ERROR', 'TASK_FAILED')
      order by e.id desc limit 1
    ),
    'running_tasks', (
      select nullif(count(*), 0) from windlass.tasks t where t.worker_id = new.id and t.status = 'running'
    ),
    'dropped_lines', (select nullif(t.dropped_lines, 0) from windlass.worker_log_totals t where t.worker_id = new.id)
  ));
  v_diagnostics := v_diagnostics || jsonb_build_object(
    'last_lines', to_jsonb(windlass_internal.last_log_lines(new.id, 20)));
  insert into windlass.diagnostics as d (worker_id, at, diagnostics)
  values (new.id, windlass.now(), windlass_internal.fitted_diagnostics(v_diagnostics))
  -- The second end of a worker, after its failure: what was known then and is not known now stays.
  on conflict (worker_id) do update
    set at = excluded.at, diagnostics = windlass_internal.merged_diagnostics(d.diagnostics, excluded.diagnostics);
  return null;
end
$$;

-- Diagnostics without as many of their largest parts as needed to keep the limit of the table. Parts are cut to
-- characters, of which each may take several bytes; a worker chooses most of the text, and must not be able to stop its
-- own termination.
create function windlass_internal.fitted_diagnostics(p_diagnostics jsonb) returns jsonb
language plpgsql immutable
as $$
declare
  v_part text;
begin
  foreach v_part in array '{vitals,boot,last_lines,machine,preparation,reason}'::text[] loop
    exit when octet_length(p_diagnostics::text) <= 16384;
    p_diagnostics := p_diagnostics - v_part;
  end loop;
  return p_diagnostics;
end
$$;

-- The earlier diagnostics with the newer ones on top.
create function windlass_internal.merged_diagnostics(p_earlier jsonb, p_newer jsonb) returns jsonb
language sql immutable
as $$ select windlass_internal.fitted_diagnostics(p_earlier || p_newer) $$;

create trigger record_diagnostics
  after update of status on windlass.workers
  for each row
  when (old.status is distinct from new.status and new.status in ('error', 'terminated'))
  execute function windlass_internal.record_diagnostics();

-- The machine of a worker was deleted: its last state in the provider's terms, and how its process ended:
-- {"code", "signal", "status"}, of which only the known ones are set.
create function windlass_internal.record_machine_state(
  p_worker_id text, p_state text, p_note text, p_exit jsonb
) returns void
language sql
as $$
  update windlass.diagnostics d
  set diagnostics = windlass_internal.merged_diagnostics(
    d.diagnostics,
    d.diagnostics || jsonb_strip_nulls(jsonb_build_object(
      'machine', jsonb_build_object('state', p_state, 'note', left(p_note, 1000)),
      'exit', case when jsonb_typeof(p_exit) = 'object' then p_exit end
    )))
  where d.worker_id = p_worker_id and p_state is not null
$$;
