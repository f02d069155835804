-- Named queries about tokens, sessions and servers. Each says who calls it and which index serves it.

-- name: create_token
-- `windlass tokens create`; tokens_name. No row if the name is taken.
select * from windlass_internal.create_token($1, $2, $3, $4, $5, $6);

-- name: tokens
-- `windlass tokens list`; a few rows.
select id, name, role, created_at, last_used_at, revoked_at, expires_at, created_by, queues, fleets
from windlass_internal.tokens
order by id desc limit $1;

-- name: had_tokens
-- Once a token was created, local requests without one are refused, also after it was revoked; primary key.
select exists (select from windlass_internal.tokens);

-- name: session
-- Each request of a browser, if it is not cached; primary key.
select name, role, valid_for_s from windlass_internal.find_session($1);

-- name: sessions
-- `windlass tokens sessions`; a few rows.
select id, role, is_link, created_at, expires_at, name
from windlass_internal.sessions where expires_at > windlass.now()
order by created_at desc, id;
