-- Engines: tasks that a dispatcher claims, and an engine (Ray) places on nodes.
--
-- A node is a worker that claims nothing. Its tasks are claimed by the fleet's dispatcher, in the dispatcher's name, and
-- become the node's when they are about to start there. Its own heartbeat says that its machine lives; which of its
-- tasks live, the dispatcher says. One dispatcher of a fleet acts, the one that holds the lease `ray:<fleet>`.

-- A dispatcher and, unless another has taken its place, the nodes of its fleet: all whose tasks are lost with it.
create function windlass_internal.dispatcher_and_nodes(p_dispatcher_id text, p_fleet text) returns text[]
language sql stable
as $$
  select array[p_dispatcher_id] || array(
    select w.id
    from windlass.workers w
    where w.fleet = p_fleet
      and w.kind = 'node'
      and w.status <> 'terminated'
      and not exists (
        select from windlass.leases l where l.name = 'ray:' || p_fleet and l.expires_at > windlass.now()
      )
  )
$$;

-- The attempts named by these tokens are about to start on these nodes: from here on they are theirs. The three arrays go
-- together. For each token: `placed`; `lost` if the claim is no longer valid; `barred` if that node gets no more tasks.
-- Repeating it is harmless.
create function windlass_internal.place_tasks(p_task_ids bigint[], p_tokens uuid[], p_worker_ids text[])
returns table (token uuid, outcome text)
language plpgsql
-- One task or hundreds, the plan is the same; to make it anew for each call would take longer than to follow it.
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
  v_now timestamptz := windlass.now();
  v_open text[];
begin
  -- A place on a node waits for this answer. If the server crashes in the next moment, the task is still its dispatcher's,
  -- and safe with it; that is not worth a wait for the disk.
  perform set_config('synchronous_commit', 'off', true);
  -- Locked against whoever is just ending them, so that a node that was found empty stays empty. In the order of their ids,
  -- as report_nodes locks them: in two different orders the two would wait for each other.
  v_open := array(
    select n.id
    from windlass.workers n
    where n.id = any (p_worker_ids)
      and n.kind = 'node'
      and n.status in ('spawning', 'active')
      and not n.paused
    order by n.id
    for no key update
  );
  return query
    with asked as (
      select a.task_id, a.token, a.worker_id, a.worker_id = any (v_open) as is_open
      from unnest(p_task_ids, p_tokens, p_worker_ids) as a (task_id, token, worker_id)
    ),
    placed as (
      update windlass.tasks t
      set worker_id = a.worker_id,
          -- Until now it waited for a place, which is nobody's time.
          started_at = case when t.worker_id = a.worker_id then t.started_at else v_now end
      from asked a
      where a.is_open
        and t.id = a.task_id
        and t.claim_token = a.token
        and t.finished_at is null
      returning t.claim_token, t.worker_id
    ),
    begun as (
      update windlass.workers w
      set first_claimed_at = v_now
      where w.first_claimed_at is null
        and w.id in (select p.worker_id from placed p)
    )
    select a.token,
      case
        when p.claim_token is not null then 'placed'
        when a.is_open then 'lost'
        else 'barred'
      end
    from asked a
    left join placed p on p.claim_token = a.token;
end
$$;

-- A dispatcher begins its term: whatever others claimed and placed before it is lost, with the driver it belonged to.
-- What ran is requeued, an attempt the poorer; what had not been placed is given back whole. Returns how many tasks.
create function windlass_internal.take_over_nodes(p_holder text, p_term bigint, p_fleet text) returns integer
language plpgsql
set enable_seqscan = off
-- We hold the lease's row: who would renew it, or stands by, waits for us.
set lock_timeout = '2s'
as $$
declare
  v_node_ids text[];
  v_dispatcher_ids text[];
  v_taken integer;
  v_given_back integer;
begin
  perform windlass_internal.require_lease('ray:' || p_fleet, p_holder, p_term);
  select
    coalesce(array_agg(w.id) filter (where w.kind = 'node'), '{}'),
    coalesce(array_agg(w.id) filter (where w.kind = 'dispatcher'), '{}')
  into v_node_ids, v_dispatcher_ids
  from windlass.workers w
  where w.fleet = p_fleet
    and w.status <> 'terminated';

  -- All of them, also those that somebody has locked: one that is passed over here would be its node's for ever, for the
  -- node lives on. Who waits too long for it asks again. And nothing is placed any more by those before it.
  perform from windlass.tasks t
  where t.worker_id = any (v_node_ids || v_dispatcher_ids)
    and t.status = 'running'
  order by t.id
  for update;

  select r.requeued + r.failed into v_taken
  from windlass_internal.requeue_tasks_of(v_node_ids, 'DISPATCHER_LOST', 'the dispatcher that had placed it was lost') as r;

  select count(*) into v_given_back
  from windlass.tasks t
  join windlass.workers w on w.id = t.worker_id
  where t.status = 'running'
    and w.fleet = p_fleet
    and w.kind = 'dispatcher';
  perform windlass.deregister_worker(w.id, 'another dispatcher took its place')
  from windlass.workers w
  where w.fleet = p_fleet
    and w.kind = 'dispatcher'
    and w.status in ('spawning', 'active', 'terminating');
  return v_taken + v_given_back;
end
$$;

-- What the engine says of a fleet's nodes: [{"worker_id", "is_managed", "node_id", "total", "used", "places", "host"}] for
-- each that is alive, and {"worker_id", "node_id", "death"} for those that it knows to be dead. A hired node that is in
-- neither is `absent` if it never was alive, and `dead` if it was. A node that nobody hired (one of a cluster that is not
-- ours) comes into being with the first word of it, is heard as often as it is reported, and ends when it is not; one that
-- is heard of after its end (nobody was there to report it) begins anew.
-- Rows that say the same already are not written again before a sixth of p_lease_s has passed, so their `at`, the moment
-- when the engine was last looked at, and the heartbeats of those that nobody hired, may be that much behind.
-- Returns who is to get no more tasks: those that end, and those that are paused.
create type windlass_internal.node_report as (
  worker_id text,
  node_id text,
  is_managed boolean,
  total jsonb,
  used jsonb,
  places integer,
  host text,
  death text
);

-- What is to be written of a node. `is_over`: nobody hired it, and it is gone.
create type windlass_internal.node_change as (worker_id text, node jsonb, places integer, is_heard boolean, is_over boolean);

-- Of each node of the fleet, what this report makes of it; only those whose row does not say so yet, or has said so for
-- longer than p_repeat_s.
create function windlass_internal.changed_nodes(p_fleet text, p_nodes windlass_internal.node_report[], p_repeat_s double precision)
returns setof windlass_internal.node_change
language sql stable
as $$
  select w.id, said.node, alive.places, heard.is_heard, w.slot is null and alive.worker_id is null
  from windlass.workers w
  left join unnest(p_nodes) as alive on alive.worker_id = w.id and alive.total is not null
  left join unnest(p_nodes) as dead on dead.worker_id = w.id and dead.death is not null
  cross join lateral (
    select case
      when alive.worker_id is not null then jsonb_build_object(
        'state', 'alive', 'node_id', alive.node_id, 'total', alive.total, 'used', alive.used)
      when dead.worker_id is not null or w.node ->> 'state' in ('alive', 'dead') then jsonb_build_object(
        'state', 'dead', 'node_id', coalesce(dead.node_id, w.node ->> 'node_id'),
        'note', coalesce(dead.death, w.node ->> 'note', 'it is no longer in the cluster'))
      else jsonb_build_object('state', 'absent')
    end as node
  ) as said
  cross join lateral (select coalesce(not alive.is_managed, false) as is_heard) as heard
  where w.fleet = p_fleet
    and w.kind = 'node'
    and w.status in ('spawning', 'active', 'terminating')
    and (
      (w.node - 'at' - 'since') is distinct from said.node
      or w.concurrency <> alive.places
      or (w.node ->> 'at')::timestamptz <= windlass.now() - make_interval(secs => p_repeat_s)
      or (heard.is_heard and w.last_heartbeat is null)
    )
$$;

create function windlass_internal.report_nodes(
  p_holder text, p_term bigint, p_fleet text, p_queues text[], p_lease_s double precision, p_nodes jsonb
) returns table (worker_id text, is_ending boolean)
language plpgsql
as $$
#variable_conflict use_column
declare
  v_now timestamptz := windlass.now();
  v_nodes windlass_internal.node_report[] := array(select n from jsonb_populate_recordset(null::windlass_internal.node_report, p_nodes) as n);
  v_news windlass_internal.node_change[];
  v_gone record;
begin
  perform windlass_internal.require_lease('ray:' || p_fleet, p_holder, p_term);

  -- The row of its earlier life makes room; its events stay.
  delete from windlass.workers w
  using unnest(v_nodes) as n
  where w.id = n.worker_id
    and not n.is_managed
    and w.kind = 'node'
    and w.slot is null
    and w.status = 'terminated';
  perform windlass.register_worker(
    n.worker_id, p_fleet, p_queues, n.places, p_lease_s, n.host, p_kind => 'node')
  from unnest(v_nodes) as n
  where not n.is_managed
    and not exists (select from windlass.workers w where w.id = n.worker_id);

  v_news := array(select n from windlass_internal.changed_nodes(p_fleet, v_nodes, p_lease_s / 6) as n);
  -- All at once and in the order of their ids, as place_tasks locks them.
  perform from windlass.workers w
  where w.id = any (array(select n.worker_id from unnest(v_news) as n))
  order by w.id
  for no key update;

  for v_gone in
    select w.id, coalesce(n.node ->> 'note', 'it is no longer in the cluster') as death
    from unnest(v_news) as n
    join windlass.workers w on w.id = n.worker_id
    where n.is_over
      and w.status in ('spawning', 'active', 'terminating')
    order by w.id
  loop
    perform windlass_internal.requeue_tasks_of(array[v_gone.id], 'NODE_DEAD', format('node %s: %s', v_gone.id, v_gone.death));
    update windlass.workers
    set status = 'terminated', terminated_at = v_now, code = 'NODE_DEAD', reason = v_gone.death
    where id = v_gone.id;
    perform windlass_internal.add_event('NODE_DEAD', v_gone.death, p_fleet, v_gone.id, null);
  end loop;

  update windlass.workers w
  set concurrency = coalesce(n.places, w.concurrency),
      last_heartbeat = case when n.is_heard then v_now else w.last_heartbeat end,
      heartbeat_gapless_since = case
        when n.is_heard then coalesce(w.heartbeat_gapless_since, v_now) else w.heartbeat_gapless_since
      end,
      node = n.node || jsonb_build_object(
        'at', v_now,
        'since', case when w.node ->> 'state' = n.node ->> 'state' then w.node -> 'since' else to_jsonb(v_now) end
      )
  from unnest(v_news) as n
  where w.id = n.worker_id
    and w.status in ('spawning', 'active', 'terminating');

  return query
    select w.id, w.status in ('terminating', 'error')
    from windlass.workers w
    where w.fleet = p_fleet
      and w.kind = 'node'
      and (w.status in ('terminating', 'error') or w.paused)
      and w.status <> 'terminated';
end
$$;
