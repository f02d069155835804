-- Named queries about tokens, sessions and servers. Each says who calls it and which index serves it.

-- name: create_token
-- `windlass tokens create`; tokens_name. No row if the name is taken.
with created as (
  insert into windlass.tokens (name, role, hash, queues, fleets, expires_at)
  values ($1, $2, $3, $4, $5, windlass.now() + make_interval(secs => $6::float8))
  on conflict (name) where revoked_at is null do nothing
  returning id, name, role, created_at, last_used_at, revoked_at, expires_at, created_by, queues, fleets
),
recorded as (
  insert into windlass.events (code, reason, detail)
  select 'TOKEN_CREATED', 'token ' || name || ' created with role ' || role,
    jsonb_build_object('token', name, 'role', role, 'queues', queues, 'fleets', fleets, 'expires_at', expires_at)
  from created
)
select * from created;

-- name: free_name
-- `windlass tokens create`; tokens_name. The name of an expired token can be used again.
update windlass.tokens set revoked_at = windlass.now()
where name = $1 and revoked_at is null and expires_at <= windlass.now();

-- name: tokens
-- `windlass tokens list`; a few rows.
select id, name, role, created_at, last_used_at, revoked_at, expires_at, created_by, queues, fleets
from windlass.tokens
order by id desc limit $1;

-- name: revoke_token
-- `windlass tokens revoke`; tokens_name.
with revoked as (
  update windlass.tokens set revoked_at = windlass.now()
  where name = $1 and revoked_at is null
  returning name
),
recorded as (
  insert into windlass.events (code, reason, detail)
  select 'TOKEN_REVOKED', 'token ' || name || ' revoked', jsonb_build_object('token', name)
  from revoked
)
select true from revoked;

-- name: had_tokens
-- Once a token was created, local requests without one are refused, also after it was revoked; primary key.
select exists (select from windlass.tokens);

-- name: create_link
-- `windlass up`, `windlass tokens link`; primary key.
insert into windlass.sessions (hash, is_link, role, expires_at, name)
values ($1, true, $2, windlass.now() + make_interval(secs => $3::float8), $4);

-- name: open_session
-- Replaces a login link by a session: each link works once; primary key.
with used as (
  delete from windlass.sessions
  where hash = $1 and is_link and expires_at > windlass.now()
  returning role, name
),
opened as (
  insert into windlass.sessions (hash, is_link, role, expires_at, name)
  select $2, false, role, windlass.now() + make_interval(secs => $3::float8), name
  from used
  returning role, name
),
recorded as (
  insert into windlass.events (code, reason, actor)
  select 'SESSION_OPENED', 'logged in by a link, role ' || role, 'session:' || name
  from opened
)
select true from opened;

-- name: create_session
-- Login through an identity provider; primary key.
with opened as (
  insert into windlass.sessions (hash, is_link, role, expires_at, name)
  values ($1, false, $2, windlass.now() + make_interval(secs => $3::float8), $4)
  returning role, name
)
insert into windlass.events (code, reason, actor)
select 'SESSION_OPENED', 'logged in through the identity provider, role ' || role, 'session:' || name
from opened;

-- name: session
-- Each request of a browser, if it is not cached; primary key.
select name, role, extract(epoch from expires_at - windlass.now())::float8 as valid_for_s from windlass.sessions
where hash = $1 and not is_link and expires_at > windlass.now();

-- name: sessions
-- `windlass tokens sessions`; a few rows.
select left(encode(hash, 'hex'), 12) as id, role, is_link, created_at, expires_at, name
from windlass.sessions where expires_at > windlass.now()
order by created_at desc, hash;

-- name: end_session
-- Logging out; primary key.
delete from windlass.sessions where hash = $1 and not is_link;

-- name: revoke_session
-- `windlass tokens revoke --session`; a few rows.
with revoked as (
  delete from windlass.sessions
  where left(encode(hash, 'hex'), 12) = $1
    and expires_at > windlass.now()
  returning name
),
recorded as (
  insert into windlass.events (code, reason)
  select 'SESSION_REVOKED', 'session of ' || name || ' revoked'
  from revoked
)
select true from revoked;
