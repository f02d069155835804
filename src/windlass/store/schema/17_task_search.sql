-- Searches of task lists.

-- Whether an attempt's error matches a search: its code, or a part of its text.
create function windlass_internal.matches_error(p_error_code text, p_error text, p_search text) returns boolean
language sql immutable parallel safe
as $$
  select coalesce(lower(p_error_code) = lower(p_search), false)
    or coalesce(position(lower(p_search) in lower(p_error)) > 0, false)
$$;

-- Whether a task matches a search: its id, the beginning of its unique key, its last error, a part of its payload, or
-- the error of an earlier attempt. Payloads of more than 8 kB as stored are not searched, because unpacking thousands
-- of them takes too long. Earlier attempts are looked up with events_task, and only for tasks that can have some:
-- `limit` keeps the planner from reading all events into a hash table instead.
create function windlass_internal.matches_search(
  p_id bigint, p_unique_key text, p_error_code text, p_error text, p_payload jsonb, p_attempts integer,
  p_ready_at timestamptz, p_search text
) returns boolean
language sql stable parallel safe
as $$
  select p_id::text = p_search
    or coalesce(starts_with(p_unique_key, p_search), false)
    or windlass_internal.matches_error(p_error_code, p_error, p_search)
    or (pg_column_size(p_payload) <= 8192 and position(lower(p_search) in lower(p_payload::text)) > 0)
    or (
      (p_attempts > 1 or p_ready_at is not null)
      and coalesce((
        select true from windlass_internal.events e
        where e.task_id = p_id and e.code in ('TASK_ERROR', 'TASK_FAILED', 'TASK_REQUEUED')
          and windlass_internal.matches_error(e.detail ->> 'error_code', e.detail ->> 'error', p_search)
        limit 1
      ), false)
    )
$$;
