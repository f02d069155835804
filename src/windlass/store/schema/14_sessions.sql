-- Tokens of people and programs, login links and sessions of browsers. The control plane reads them without their
-- hashes.

-- Create a token and return its row. No row if an active token has the name; the name of an expired one is free again.
-- Index tokens_name.
create function windlass_internal.create_token(
  p_name text, p_role text, p_hash bytea, p_queues text[], p_fleets text[], p_ttl_s double precision
) returns table (
  id bigint,
  name text,
  role text,
  created_at timestamptz,
  last_used_at timestamptz,
  revoked_at timestamptz,
  expires_at timestamptz,
  created_by text,
  queues text[],
  fleets text[]
)
language plpgsql
as $$
#variable_conflict use_column
begin
  update windlass.tokens set revoked_at = windlass.now()
  where name = p_name and revoked_at is null and expires_at <= windlass.now();
  return query
    with created as (
      insert into windlass.tokens (name, role, hash, queues, fleets, expires_at)
      values (p_name, p_role, p_hash, p_queues, p_fleets, windlass.now() + make_interval(secs => p_ttl_s))
      on conflict (name) where revoked_at is null do nothing
      returning *
    ),
    recorded as (
      insert into windlass.events (code, reason, detail)
      select 'TOKEN_CREATED', 'token ' || c.name || ' created with role ' || c.role,
        jsonb_build_object('token', c.name, 'role', c.role, 'queues', c.queues, 'fleets', c.fleets,
          'expires_at', c.expires_at)
      from created c
    )
    select c.id, c.name::text, c.role, c.created_at, c.last_used_at, c.revoked_at, c.expires_at, c.created_by, c.queues,
      c.fleets
    from created c;
end
$$;

-- Revoke the active token of this name. True if there was one. Index tokens_name.
create function windlass_internal.revoke_token(p_name text) returns boolean
language sql
as $$
  with revoked as (
    update windlass.tokens set revoked_at = windlass.now()
    where name = p_name and revoked_at is null
    returning name
  ),
  recorded as (
    insert into windlass.events (code, reason, detail)
    select 'TOKEN_REVOKED', 'token ' || r.name || ' revoked', jsonb_build_object('token', r.name)
    from revoked r
  )
  select exists (select from revoked)
$$;

-- A login link for a person.
create function windlass_internal.create_link(p_hash bytea, p_role text, p_ttl_s double precision, p_name text)
returns void
language sql
as $$
  with created as (
    insert into windlass.sessions (hash, is_link, role, expires_at, name)
    values (p_hash, true, p_role, windlass.now() + make_interval(secs => p_ttl_s), p_name)
    returning role, name, expires_at
  )
  insert into windlass.events (code, reason, detail)
  select 'LINK_CREATED', 'login link for ' || c.name || ' created, role ' || c.role,
    jsonb_build_object('person', c.name, 'role', c.role, 'expires_at', c.expires_at)
  from created c
$$;

-- Replace a login link by a session: each link works once. True if it did.
create function windlass_internal.open_session(p_link_hash bytea, p_hash bytea, p_ttl_s double precision)
returns boolean
language sql
as $$
  with used as (
    delete from windlass.sessions
    where hash = p_link_hash and is_link and expires_at > windlass.now()
    returning role, name
  ),
  opened as (
    insert into windlass.sessions (hash, is_link, role, expires_at, name)
    select p_hash, false, u.role, windlass.now() + make_interval(secs => p_ttl_s), u.name
    from used u
    returning role, name
  ),
  recorded as (
    insert into windlass.events (code, reason, actor)
    select 'SESSION_OPENED', 'logged in by a link, role ' || o.role, 'session:' || o.name
    from opened o
  )
  select exists (select from opened)
$$;

-- A login through an identity provider.
create function windlass_internal.create_session(p_hash bytea, p_role text, p_ttl_s double precision, p_name text)
returns void
language sql
as $$
  with opened as (
    insert into windlass.sessions (hash, is_link, role, expires_at, name)
    values (p_hash, false, p_role, windlass.now() + make_interval(secs => p_ttl_s), p_name)
    returning role, name
  )
  insert into windlass.events (code, reason, actor)
  select 'SESSION_OPENED', 'logged in through the identity provider, role ' || o.role, 'session:' || o.name
  from opened o
$$;

-- Each request of a browser, if it is not cached; primary key.
create function windlass_internal.find_session(p_hash bytea)
returns table (name text, role text, valid_for_s double precision)
language sql stable
as $$
  select s.name, s.role, extract(epoch from s.expires_at - windlass.now())::float8 from windlass.sessions s
  where s.hash = p_hash and not s.is_link and s.expires_at > windlass.now()
$$;

-- Logging out.
create function windlass_internal.end_session(p_hash bytea) returns void
language sql
as $$
  with ended as (
    delete from windlass.sessions where hash = p_hash and not is_link
    returning name
  )
  insert into windlass.events (code, reason, actor)
  select 'SESSION_ENDED', 'logged out', 'session:' || e.name
  from ended e
$$;

-- End a session, or an unused link, by its id, which is the beginning of its hash. True if there was one.
create function windlass_internal.revoke_session(p_id text) returns boolean
language sql
as $$
  with revoked as (
    delete from windlass.sessions
    where left(encode(hash, 'hex'), 12) = p_id and expires_at > windlass.now()
    returning name
  ),
  recorded as (
    insert into windlass.events (code, reason)
    select 'SESSION_REVOKED', 'session of ' || r.name || ' revoked'
    from revoked r
  )
  select exists (select from revoked)
$$;
