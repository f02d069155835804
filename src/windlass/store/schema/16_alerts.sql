-- Alerts and the outbox of their messages.

-- Record the alerts that fire now, [{"fleet", "key", "code", "severity", "reason"}], and one message per notifier for
-- each alert that fires or resolves. An alert that was not seen for p_resolve_after_s resolves: a cause that comes and
-- goes is one alert. A notifier that did not send the firing message gets no resolved message: the firing message is
-- abandoned. If it is being sent at this moment, mark_message_delivered adds the resolved message. Returns what fired
-- and resolved.
create function windlass_internal.record_alerts(p_firing jsonb, p_notifiers text[], p_resolve_after_s double precision)
returns table (kind text, fleet text, code text, reason text)
language plpgsql
as $$
#variable_conflict use_column
declare
  v_now timestamptz := windlass.now();
  v_resolved bigint[];
begin
  return query
    with firing as (
      select f.fleet, f.key, f.code, f.severity, f.reason
      from jsonb_to_recordset(p_firing) as f (fleet text, key text, code text, severity text, reason text)
      -- The same order in every transaction prevents deadlocks.
      order by f.fleet, f.key
    ),
    recorded as (
      insert into windlass.alerts as a (fleet, key, code, severity, reason)
      select f.fleet, f.key, f.code, f.severity, f.reason from firing f
      on conflict (coalesce(fleet, ''), key) where resolved_at is null do update
        set seen_at = v_now, reason = excluded.reason
      returning a.id, a.fleet, a.code, a.reason, a.xmax = 0 as is_new
    ),
    queued as (
      insert into windlass.messages (alert_id, notifier, kind)
      select n.id, r, 'firing' from recorded n cross join unnest(p_notifiers) as r where n.is_new
    )
    select 'firing', n.fleet, n.code, n.reason from recorded n where n.is_new;

  with resolved as (
    update windlass.alerts a set resolved_at = v_now
    where a.resolved_at is null and a.seen_at <= v_now - make_interval(secs => p_resolve_after_s)
    returning a.id
  )
  select array_agg(o.id) into v_resolved from resolved o;

  update windlass.messages m
  set abandoned_at = v_now, error = 'alert resolved before this message was sent'
  where m.alert_id = any (v_resolved) and m.kind = 'firing' and m.delivered_at is null and m.abandoned_at is null;

  -- A separate statement: it sees messages that were delivered while the one above waited for their locks.
  insert into windlass.messages (alert_id, notifier, kind)
  select m.alert_id, m.notifier, 'resolved' from windlass.messages m
  where m.alert_id = any (v_resolved) and m.kind = 'firing' and m.delivered_at is not null
    and m.notifier = any (p_notifiers);

  return query
    select 'resolved', a.fleet, a.code, a.reason from windlass.alerts a
    where a.id = any (v_resolved)
    order by a.id;
end
$$;

-- Claim due messages for p_lease_s. The sender reports the outcome; otherwise they are due again.
create function windlass_internal.claim_messages(p_notifiers text[], p_lease_s double precision, p_limit integer)
returns table (
  id bigint, notifier text, kind text, attempts integer, alert_id bigint, fleet text, code text, severity text,
  reason text, since timestamptz, resolved_at timestamptz
)
language sql
as $$
  update windlass.messages m
  set attempts = m.attempts + 1, due_at = windlass.now() + make_interval(secs => p_lease_s)
  from windlass.alerts a
  where m.id = any (array(
      select d.id from windlass.messages d
      where d.delivered_at is null and d.abandoned_at is null and d.due_at <= windlass.now()
        and d.notifier = any (p_notifiers)
      order by d.due_at, d.id limit p_limit for update skip locked
    ))
    and a.id = m.alert_id
  returning m.id, m.notifier, m.kind, m.attempts, a.id, a.fleet, a.code, a.severity, a.reason, a.since, a.resolved_at
$$;

-- A message was delivered. If its alert resolved meanwhile, the resolved message is next.
create function windlass_internal.mark_message_delivered(p_id bigint) returns void
language plpgsql
as $$
begin
  update windlass.messages set delivered_at = windlass.now(), abandoned_at = null, error = null where id = p_id;
  -- A separate statement: it sees an alert that resolved while the one above waited for its lock.
  insert into windlass.messages (alert_id, notifier, kind)
  select m.alert_id, m.notifier, 'resolved' from windlass.messages m
  join windlass.alerts a on a.id = m.alert_id
  where m.id = p_id and m.kind = 'firing' and a.resolved_at is not null
  on conflict do nothing;
end
$$;
