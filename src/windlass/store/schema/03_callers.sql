-- Who calls: trusted users, workers with a secret, and all others.
--
-- Public functions run with the rights of the schema's owner (18_privileges.sql). So current_user says nothing about
-- the caller; the session's user and its role do.

-- The user, or the role that it set with SET ROLE. A function cannot change either.
create function windlass_internal.caller() returns name
language sql stable parallel restricted
as $$
  select case current_setting('role') when 'none' then session_user else current_setting('role')::name end
$$;

-- Whether the caller may act for every worker: the owner, an orchestrator, a superuser. No other role may enter the
-- schema windlass_internal.
create function windlass_internal.is_trusted() returns boolean
language sql stable parallel restricted
as $$
  select has_schema_privilege(
    case current_setting('role') when 'none' then session_user else current_setting('role')::name end,
    'windlass_internal', 'usage')
$$;

-- The clock and the name that events show are settings of a session: tests run in virtual time with one, programs name
-- their user with the other. A caller that is not trusted may not set the clock, and its name becomes that of its role.
create function windlass_internal.check_settings() returns void
language plpgsql
as $$
begin
  if coalesce(current_setting('windlass.now', true), '') = '' and coalesce(current_setting('windlass.actor', true), '') = ''
    or windlass_internal.is_trusted()
  then
    return;
  end if;
  if coalesce(current_setting('windlass.now', true), '') <> '' then
    raise exception 'this user may not set windlass.now' using errcode = 'insufficient_privilege';
  end if;
  -- Until the end of the caller's transaction.
  perform set_config('windlass.actor', 'database:' || windlass_internal.caller(), true);
end
$$;

-- Raise unless the caller may act as this worker: it has the worker's secret, or it is trusted and gives none. An id
-- without a row passes: the functions change nothing for it.
create function windlass_internal.check_worker(p_worker_id text, p_secret text) returns void
language plpgsql
as $$
begin
  if p_secret is null then
    if not windlass_internal.is_trusted() then
      raise exception 'worker % needs its secret: pass p_secret', p_worker_id using errcode = 'insufficient_privilege';
    end if;
    return;
  end if;
  if exists (
    select from windlass.workers w
    where w.id = p_worker_id and w.secret_hash is distinct from sha256(convert_to(p_secret, 'UTF8'))
  ) then
    -- The same error as for a terminated worker: the program must register under a new id.
    raise exception 'worker % is registered with another secret: register a new one', p_worker_id
      using errcode = 'no_data_found';
  end if;
  perform windlass_internal.check_settings();
end
$$;
