-- The table of an app on Supabase: users insert rows through the API and watch their status.
create table public.pictures (
  id uuid primary key default gen_random_uuid(),
  user_id uuid not null default auth.uid(),
  status text not null default 'queued' check (status in ('queued', 'running', 'done', 'failed', 'cancelled')),
  input jsonb not null,
  progress real,
  output jsonb,
  error text,
  created_at timestamptz not null default now()
);

-- Users see and insert their own rows, and may cancel them. Everything else is written by Windlass.
alter table public.pictures enable row level security;
revoke all on public.pictures from anon, authenticated;
grant select, insert (input), update (status), delete on public.pictures to authenticated;
create policy own_rows on public.pictures for all to authenticated
  using (user_id = (select auth.uid()))
  with check (user_id = (select auth.uid()) and status in ('queued', 'cancelled'));
