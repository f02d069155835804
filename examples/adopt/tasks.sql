-- The table of an application, as it was before Windlass. Its own workers claimed rows by their status.
create type public.generation_status as enum ('Queued', 'In Progress', 'Complete', 'Failed', 'Cancelled');

create table public.tasks (
  id uuid primary key default gen_random_uuid(),
  status public.generation_status not null default 'Queued',
  prompt text not null,
  attempts integer not null default 0,
  worker_id text,
  generation_started_at timestamptz,
  generation_processed_at timestamptz,
  output_url text,
  error text,
  created_at timestamptz not null default now()
);
create index on public.tasks (created_at);

insert into public.tasks (prompt) values ('a lighthouse'), ('a harbour'), ('a gull');
