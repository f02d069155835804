-- Ray fleets: a dispatcher claims tasks, and Ray places them on nodes.
--
-- A node is a worker that claims nothing. The dispatcher claims tasks in its own name; a task becomes the node's when
-- it is about to start there. The node's heartbeat says that its machine is alive; the dispatcher's heartbeat names the
-- claims of its running tasks. One dispatcher per fleet acts: the holder of the lease `ray:<fleet>`.

-- The attempts named by these tokens are about to start on these nodes and now belong to them. The three arrays belong
-- together. Per token: `placed`; `lost` if the claim is no longer valid; `barred` if the node accepts no more tasks.
-- Repeating the call is safe.
create function windlass_internal.place_tasks(p_task_ids bigint[], p_tokens uuid[], p_worker_ids text[])
returns table (token uuid, outcome text)
language plpgsql
-- The plan is the same for one task or hundreds, and planning would take longer than executing it.
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
  v_now timestamptz := windlass.now();
  v_open text[];
  v_spawning text[];
begin
  -- A free slot on a node waits for this answer. After a crash of the server the task still belongs to its dispatcher,
  -- which is safe, so the commit need not wait for the disk.
  perform set_config('synchronous_commit', 'off', true);
  -- Locked, so that a node that another transaction is draining gets no task; in the order of their ids.
  select coalesce(array_agg(o.id), '{}'), array_agg(o.id) filter (where o.status = 'spawning')
  into v_open, v_spawning
  from (
    select n.id, n.status from windlass.workers n
    where n.id = any (p_worker_ids) and n.kind = 'node' and n.status in ('spawning', 'active')
      and not n.paused
    order by n.id for no key update
  ) as o;
  return query
    with asked as (
      select a.task_id, a.token, a.worker_id, a.worker_id = any (v_open) as is_open
      from unnest(p_task_ids, p_tokens, p_worker_ids) as a (task_id, token, worker_id)
    ),
    placed as (
      update windlass.tasks t
      set worker_id = a.worker_id,
          -- The attempt starts on the node: until now the task only waited for capacity.
          started_at = case when t.worker_id = a.worker_id then t.started_at else v_now end
      from asked a
      where a.is_open and t.id = a.task_id and t.claim_token = a.token and t.finished_at is null
      returning t.claim_token, t.worker_id
    ),
    begun as (
      update windlass.workers w set first_claimed_at = v_now
      where w.first_claimed_at is null and w.id in (select p.worker_id from placed p)
    )
    select a.token,
      case
        when p.claim_token is not null then 'placed'
        when a.is_open then 'lost'
        else 'barred'
      end
    from asked a
    left join placed p on p.claim_token = a.token;

  -- A node that runs tasks is active: it does not wait for the next cycle to say so.
  if v_spawning is not null then
    perform windlass_internal.promote_worker(n.id, 'started its first task')
    from windlass.workers n
    where n.id = any (v_spawning) and n.first_claimed_at is not null;
  end if;
end
$$;

-- A dispatcher begins its term: all tasks that earlier dispatchers claimed or placed are lost with their Ray driver.
-- Running tasks are requeued, and the attempt counts; tasks that were not placed are released. Returns the number of
-- tasks.
create function windlass_internal.take_over_nodes(p_holder text, p_term bigint, p_fleet text) returns integer
language plpgsql
set enable_seqscan = off
-- This call holds the lease's row: its renewal and all standbys wait for it.
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

  -- All of them, also locked ones: a task that is skipped here would stay with its node, which lives on. After
  -- lock_timeout the caller retries. Earlier dispatchers can place nothing from here on.
  perform from windlass.tasks t
  where t.worker_id = any (v_node_ids || v_dispatcher_ids) and t.status = 'running'
  order by t.id for update;

  select r.requeued + r.failed into v_taken
  from windlass_internal.requeue_tasks_of(v_node_ids, 'DISPATCHER_LOST', 'its dispatcher was lost') as r;

  select count(*) into v_given_back from windlass.tasks t
  join windlass.workers w on w.id = t.worker_id
  where t.status = 'running' and w.fleet = p_fleet and w.kind = 'dispatcher';
  perform windlass.deregister_worker(w.id, 'replaced by another dispatcher')
  from windlass.workers w
  where w.fleet = p_fleet
    and w.kind = 'dispatcher' and w.status in ('spawning', 'active', 'terminating');
  return v_taken + v_given_back;
end
$$;

-- One node as Ray reports it. `total` is set if it is alive, `death` if it is dead.
create type windlass_internal.node_report as (
  worker_id text,
  node_id text,
  is_managed boolean,
  total jsonb,
  used jsonb,
  slots integer,
  host text,
  death text
);

-- What is to be written about a node. `is_gone`: it is gone, and no fleet spawned it. `is_heartbeat`: the report counts
-- as its heartbeat.
create type windlass_internal.node_change as (
  worker_id text, node jsonb, slots integer, is_heartbeat boolean, is_gone boolean
);

-- Changes of a fleet's nodes according to this report: nodes whose row differs, or was written more than p_repeat_s
-- ago.
create function windlass_internal.changed_nodes(
  p_fleet text, p_nodes windlass_internal.node_report[], p_repeat_s double precision
)
returns setof windlass_internal.node_change
language sql stable
as $$
  select w.id, said.node, alive.slots, beat.is_heartbeat, w.slot is null and alive.worker_id is null
  from windlass.workers w
  left join unnest(p_nodes) as alive on alive.worker_id = w.id and alive.total is not null
  left join unnest(p_nodes) as dead on dead.worker_id = w.id and dead.death is not null
  cross join lateral (
    select case
      when alive.worker_id is not null then jsonb_build_object(
        'state', 'alive', 'node_id', alive.node_id, 'total', alive.total, 'used', alive.used)
      when dead.worker_id is not null or w.node ->> 'state' in ('alive', 'dead') then jsonb_build_object(
        'state', 'dead', 'node_id', coalesce(dead.node_id, w.node ->> 'node_id'),
        'note', coalesce(dead.death, w.node ->> 'note', 'no longer in the Ray cluster'))
      else jsonb_build_object('state', 'absent')
    end as node
  ) as said
  cross join lateral (select coalesce(not alive.is_managed, false) as is_heartbeat) as beat
  where w.fleet = p_fleet and w.kind = 'node' and w.status in ('spawning', 'active', 'terminating')
    and (
      (w.node - 'at' - 'since') is distinct from said.node
      or w.concurrency <> alive.slots
      or (w.node ->> 'at')::timestamptz <= windlass.now() - make_interval(secs => p_repeat_s)
      or (beat.is_heartbeat and w.last_heartbeat is null)
    )
$$;

-- Record Ray's report about a fleet's nodes: [{"worker_id", "is_managed", "node_id", "total", "used", "slots",
-- "host"}] for live nodes and {"worker_id", "node_id", "death"} for dead ones. A spawned node in neither list is
-- `absent` if it never was alive, and `dead` if it was. A node that no fleet spawned (of a cluster that Windlass does
-- not manage) is created by its first report, each report counts as its heartbeat, and it is terminated when it is
-- missing; a later report creates it anew. An unchanged row is not written again before a sixth of p_lease_s has
-- passed, so its `at` and the heartbeats of unmanaged nodes may be that much behind. Returns the nodes that get no more
-- tasks: ending or paused.
create function windlass_internal.report_nodes(
  p_holder text, p_term bigint, p_fleet text, p_queues text[], p_lease_s double precision, p_nodes jsonb
) returns table (worker_id text, is_ending boolean)
language plpgsql
as $$
#variable_conflict use_column
declare
  v_now timestamptz := windlass.now();
  v_nodes windlass_internal.node_report[] := array(
    select n from jsonb_populate_recordset(null::windlass_internal.node_report, p_nodes) as n);
  v_changes windlass_internal.node_change[];
  v_gone record;
begin
  perform windlass_internal.require_lease('ray:' || p_fleet, p_holder, p_term);

  -- Delete the row of its earlier incarnation. Its events stay.
  delete from windlass.workers w
  using unnest(v_nodes) as n
  where w.id = n.worker_id and not n.is_managed and w.kind = 'node' and w.slot is null
    and w.status = 'terminated';
  perform windlass.register_worker(
    n.worker_id, p_fleet, p_queues, n.slots, p_lease_s, n.host, p_kind => 'node')
  from unnest(v_nodes) as n
  where not n.is_managed and not exists (select from windlass.workers w where w.id = n.worker_id);

  v_changes := array(select n from windlass_internal.changed_nodes(p_fleet, v_nodes, p_lease_s / 6) as n);
  perform windlass_internal.lock_workers(array(select n.worker_id from unnest(v_changes) as n));

  for v_gone in
    select w.id, coalesce(n.node ->> 'note', 'no longer in the Ray cluster') as death
    from unnest(v_changes) as n
    join windlass.workers w on w.id = n.worker_id
    where n.is_gone and w.status in ('spawning', 'active', 'terminating')
    order by w.id
  loop
    perform windlass_internal.requeue_tasks_of(array[v_gone.id], 'NODE_DEAD',
      format('node %s: %s', v_gone.id, v_gone.death));
    update windlass.workers
    set status = 'terminated', terminated_at = v_now, code = 'NODE_DEAD', reason = v_gone.death
    where id = v_gone.id;
    perform windlass_internal.add_event('NODE_DEAD', v_gone.death, p_fleet, v_gone.id, null);
  end loop;

  update windlass.workers w
  set concurrency = coalesce(n.slots, w.concurrency),
      last_heartbeat = case when n.is_heartbeat then v_now else w.last_heartbeat end,
      heartbeat_gapless_since = case
        when n.is_heartbeat then coalesce(w.heartbeat_gapless_since, v_now) else w.heartbeat_gapless_since
      end,
      node = n.node || jsonb_build_object(
        'at', v_now,
        'since', case when w.node ->> 'state' = n.node ->> 'state' then w.node -> 'since' else to_jsonb(v_now) end
      )
  from unnest(v_changes) as n
  where w.id = n.worker_id and w.status in ('spawning', 'active', 'terminating');

  return query
    select w.id, w.status in ('terminating', 'error') from windlass.workers w
    where w.fleet = p_fleet and w.kind = 'node'
      and (w.status in ('terminating', 'error') or w.paused)
      and w.status <> 'terminated';
end
$$;
