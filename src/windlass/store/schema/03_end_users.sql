-- Signed-in end users of PostgREST (Supabase): enqueue into open queues, read their own tasks, and nothing else.
--
-- PostgREST sets `request.jwt.claims` for each request, after it has checked the token. The user is its claim `sub`. A
-- role with an SQL connection of its own could set any claims, so end users must not have one.

-- Add a task that belongs to the signed-in user, and return its id. If the user has a task with this unique key in this
-- queue, return the id of that task, unchanged. Raises if the queue is not in windlass.open_queues.
create function windlass.submit_task(p_queue text, p_payload jsonb default 'null', p_unique_key text default null)
returns bigint
language plpgsql
as $$
declare
  v_sub text := nullif(nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'sub', '');
  -- The user is part of the key: another user's task with the same key is another task. With its length, because both
  -- may contain spaces.
  v_key text := length(v_sub) || ':' || v_sub || ' ' || p_unique_key;
  v_open windlass.open_queues;
  v_id bigint;
begin
  perform windlass_internal.check_settings();
  if v_sub is null or length(v_sub) > 100 then
    raise exception 'sign in to submit a task' using errcode = 'insufficient_privilege';
  end if;
  select o.* into v_open from windlass.open_queues o where o.queue = p_queue;
  if not found then
    raise exception 'queue % is not open to end users', quote_nullable(left(p_queue, 80))
      using errcode = 'insufficient_privilege';
  end if;
  if octet_length(p_payload::text) > v_open.max_payload_bytes then
    raise exception 'the payload has % bytes and at most % are accepted', octet_length(p_payload::text),
      v_open.max_payload_bytes using errcode = 'program_limit_exceeded';
  end if;
  if length(p_unique_key) not between 1 and 90 then
    raise exception 'a unique key has 1 to 90 characters' using errcode = 'invalid_parameter_value';
  end if;

  -- One submission of a user at a time: two would each see a count below the limit.
  perform pg_advisory_xact_lock(hashtext('windlass.submit_task'), hashtext(v_sub));
  -- With the owner: a producer may have chosen the same text as a key.
  select t.id into v_id from windlass.tasks t
  where t.queue = p_queue and t.unique_key = v_key and t.adoption is null and t.owner = 'jwt:' || v_sub;
  if found then
    return v_id;
  end if;
  if (
    select count(*)
    from (
      select from windlass.tasks t
      where t.owner = 'jwt:' || v_sub and t.owner like 'jwt:%' and t.queue = p_queue
        and t.status in ('queued', 'running', 'error')
      limit v_open.max_unfinished
    ) as unfinished
  ) >= v_open.max_unfinished then
    raise exception 'you have % unfinished tasks in queue %: wait until one has finished', v_open.max_unfinished,
      p_queue using errcode = 'program_limit_exceeded';
  end if;
  insert into windlass.tasks (queue, payload, unique_key, owner)
  values (p_queue, p_payload, v_key, 'jwt:' || v_sub)
  returning id into v_id;
  return v_id;
end
$$;

-- The tasks of the signed-in user. It runs with the rights of its owner, so that the user needs none on the table; a
-- barrier, so that a function in the user's filter sees no other rows.
create view windlass.my_tasks with (security_barrier) as
select
  t.id, t.queue, t.status, t.attempts, t.created_at, t.started_at, t.finished_at, t.progress, t.progress_note,
  t.error_code, t.error, t.payload, t.result
from windlass.tasks t
where t.owner = 'jwt:' || (nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'sub')
  and t.owner like 'jwt:%';
