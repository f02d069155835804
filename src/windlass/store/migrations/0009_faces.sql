-- What the faces need beyond what the control loop keeps: how things stood over time, what people were told, who is
-- looking. Retention is applied by whoever writes it: sweep_alerts to what people were told, purge_servers to the rest.

-- How a fleet stood at a moment: what charts are drawn from. A cycle's snapshot holds every worker and is far too large
-- to be read by the thousand.
create table windlass.samples (
  fleet text not null,
  at timestamptz not null,
  queued integer not null,
  running integer not null,
  spawning integer not null,
  active integer not null,
  terminating integer not null,
  error integer not null,
  completed_per_minute real not null,
  wait_p95_s real,
  -- Of the currency it pays most in; null where machines have no price.
  burn_micros_per_hour bigint,
  currency text,
  primary key (fleet, at)
);
create index samples_at on windlass.samples (at);

-- What is, or was, the matter: one row from its beginning to its end. `key` says what it is about ("SLOT_FAILED 3").
create table windlass.alerts (
  id bigint generated always as identity primary key,
  fleet text,
  key text not null,
  code text not null,
  severity text not null check (severity in ('warning', 'critical')),
  reason text not null,
  since timestamptz not null default windlass.now(),
  seen_at timestamptz not null default windlass.now(),
  resolved_at timestamptz
);
-- The same thing is the matter once, whoever notices it.
create unique index alerts_open on windlass.alerts (coalesce(fleet, ''), key) where resolved_at is null;
create index alerts_resolved on windlass.alerts (resolved_at) where resolved_at is not null;

-- What is to be told of it, to whom. A message is written together with what it tells, so that no restart forgets it or
-- tells it twice; whoever sends it takes it for a while.
create table windlass.messages (
  id bigint generated always as identity primary key,
  alert_id bigint not null references windlass.alerts (id) on delete cascade,
  notifier text not null,
  kind text not null check (kind in ('firing', 'resolved')),
  due_at timestamptz not null default windlass.now(),
  attempts integer not null default 0,
  delivered_at timestamptz,
  abandoned_at timestamptz,
  error text,
  unique (alert_id, notifier, kind)
);
create index messages_due on windlass.messages (due_at) where delivered_at is null and abandoned_at is null;

-- Write down what is the matter now, [{"fleet", "key", "code", "severity", "reason"}], and for each beginning and each end
-- a message to every notifier. What has not been seen for p_resolve_after_s is over: a cause that comes and goes is one.
-- Whoever was not told that it began is not told that it is over: such a message is given up, and one that is on its way
-- just then is followed by its end when it has arrived (message_delivered). Returns what began and what ended.
create function windlass_internal.record_alerts(p_firing jsonb, p_notifiers text[], p_resolve_after_s double precision)
returns table (kind text, fleet text, code text, reason text)
language plpgsql
as $$
#variable_conflict use_column
declare
  v_now timestamptz := windlass.now();
  v_over bigint[];
begin
  return query
    with firing as (
      select f.fleet, f.key, f.code, f.severity, f.reason
      from jsonb_to_recordset(p_firing) as f (fleet text, key text, code text, severity text, reason text)
      -- In one order for all who do this, so that two of them never wait for each other.
      order by f.fleet, f.key
    ),
    noted as (
      insert into windlass.alerts as a (fleet, key, code, severity, reason)
      select f.fleet, f.key, f.code, f.severity, f.reason from firing f
      on conflict (coalesce(fleet, ''), key) where resolved_at is null do update
        set seen_at = v_now, reason = excluded.reason
      returning a.id, a.fleet, a.code, a.reason, a.xmax = 0 as is_new
    ),
    told as (
      insert into windlass.messages (alert_id, notifier, kind)
      select n.id, r, 'firing' from noted n cross join unnest(p_notifiers) as r where n.is_new
    )
    select 'firing', n.fleet, n.code, n.reason from noted n where n.is_new;

  with over as (
    update windlass.alerts a
    set resolved_at = v_now
    where a.resolved_at is null
      and a.seen_at <= v_now - make_interval(secs => p_resolve_after_s)
    returning a.id
  )
  select array_agg(o.id) into v_over from over o;

  update windlass.messages m
  set abandoned_at = v_now, error = 'it was over before it was told'
  where m.alert_id = any (v_over) and m.kind = 'firing' and m.delivered_at is null and m.abandoned_at is null;

  -- A statement of its own: it sees what was delivered while the one above waited for it.
  insert into windlass.messages (alert_id, notifier, kind)
  select m.alert_id, m.notifier, 'resolved'
  from windlass.messages m
  where m.alert_id = any (v_over)
    and m.kind = 'firing'
    and m.delivered_at is not null
    and m.notifier = any (p_notifiers);

  return query
    select 'resolved', a.fleet, a.code, a.reason
    from windlass.alerts a
    where a.id = any (v_over)
    order by a.id;
end
$$;

-- Take messages that are due, for p_lease_s: whoever takes one says what became of it, or it is due again.
create function windlass_internal.claim_messages(p_notifiers text[], p_lease_s double precision, p_limit integer) returns table (
  id bigint, notifier text, kind text, attempts integer, alert_id bigint, fleet text, code text, severity text, reason text,
  since timestamptz, resolved_at timestamptz
)
language sql
as $$
  update windlass.messages m
  set attempts = m.attempts + 1, due_at = windlass.now() + make_interval(secs => p_lease_s)
  from windlass.alerts a
  where m.id = any (array(
      select d.id
      from windlass.messages d
      where d.delivered_at is null
        and d.abandoned_at is null
        and d.due_at <= windlass.now()
        and d.notifier = any (p_notifiers)
      order by d.due_at, d.id
      limit p_limit
      for update skip locked
    ))
    and a.id = m.alert_id
  returning m.id, m.notifier, m.kind, m.attempts, a.id, a.fleet, a.code, a.severity, a.reason, a.since, a.resolved_at
$$;

-- A message has arrived. If what it tells was over by then, its end is told next.
create function windlass_internal.mark_message_delivered(p_id bigint) returns void
language plpgsql
as $$
begin
  update windlass.messages set delivered_at = windlass.now(), abandoned_at = null, error = null where id = p_id;
  -- A statement of its own: it sees what ended while the one above waited for it.
  insert into windlass.messages (alert_id, notifier, kind)
  select m.alert_id, m.notifier, 'resolved'
  from windlass.messages m
  join windlass.alerts a on a.id = m.alert_id
  where m.id = p_id
    and m.kind = 'firing'
    and a.resolved_at is not null
  on conflict do nothing;
end
$$;

-- A person's browser, by the hash of its cookie; before that, by the hash of the link that lets it in.
create table windlass.sessions (
  hash bytea primary key,
  is_link boolean not null,
  role text not null check (role in ('viewer', 'operator')),
  created_at timestamptz not null default windlass.now(),
  expires_at timestamptz not null
);

-- Where running orchestrators serve people: each says so every few seconds, and takes it back when it ends.
create table windlass.http_servers (
  url text not null,
  -- On which it runs: an address of its loopback is of no use on another.
  host text not null,
  seen_at timestamptz not null default windlass.now(),
  primary key (url, host)
);

-- In what words a cause was told: looked for every few seconds among all that happened for hours.
create index events_alert on windlass.events (at) where code = 'ALERT';

-- Lists of live workers, in the order of their slots. Heartbeats change none of these columns.
create index workers_by_slot on windlass.workers (fleet, coalesce(slot, 2147483647), id) where status <> 'terminated';
-- How many have ended, for metrics.
create index workers_terminated_by_fleet on windlass.workers (fleet) where status = 'terminated';
create index logs_worker on windlass.logs (worker_id, id) where worker_id is not null;

-- Whether a task is what somebody looks for: an id, the beginning of a unique key, an error's code or a part of its text.
create function windlass_internal.matches_search(p_id bigint, p_unique_key text, p_error_code text, p_error text, p_search text)
returns boolean
language sql immutable parallel safe
as $$
  select p_id::text = p_search
    or coalesce(starts_with(p_unique_key, p_search), false)
    or coalesce(lower(p_error_code) = lower(p_search), false)
    or coalesce(position(lower(p_search) in lower(p_error)) > 0, false)
$$;

-- Apply retention to what is over, and to what was told of it. Returns how many alerts are gone, at most p_limit.
create function windlass_internal.sweep_alerts(p_alerts_s double precision, p_limit integer default 1000) returns integer
language sql
set enable_seqscan = off
as $$
  with gone as (
    delete from windlass.alerts where id = any (array(
      select a.id from windlass.alerts a
      where a.resolved_at < windlass.now() - make_interval(secs => p_alerts_s)
      order by a.resolved_at
      limit p_limit
    ))
    returning id
  )
  select count(*)::integer from gone
$$;

-- Apply retention to the rest. Returns how many rows are gone, at most p_limit of each kind that grows by itself.
create function windlass_internal.sweep_dashboard(p_samples_s double precision, p_limit integer default 1000) returns integer
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
    order by o.at
    limit p_limit
  ) as old
  where s.fleet = old.fleet and s.at = old.at;
  get diagnostics v_count = row_count;
  v_deleted := v_deleted + v_count;

  delete from windlass.sessions where expires_at <= v_now;
  get diagnostics v_count = row_count;
  v_deleted := v_deleted + v_count;

  -- Of those that could not take it back.
  delete from windlass.http_servers where seen_at < v_now - interval '1 hour';
  get diagnostics v_count = row_count;
  return v_deleted + v_count;
end
$$;
