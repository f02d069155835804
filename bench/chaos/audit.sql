-- What the database accepted, written by triggers in the same transactions. The product knows nothing of these tables.

create schema audit;

-- Every change of a task's status, with the claim and the worker that it names.
create table audit.transitions (
  id bigint generated always as identity primary key,
  task_id bigint not null,
  queue text not null,
  before text,
  after text not null,
  token uuid,
  worker_id text
);

create function audit.record_transition() returns trigger
language plpgsql
as $$
begin
  insert into audit.transitions (task_id, queue, before, after, token, worker_id)
  values (new.id, new.queue, case when tg_op = 'UPDATE' then old.status::text end, new.status::text, new.claim_token,
    new.worker_id);
  return null;
end
$$;

create trigger record_transition after update on windlass.tasks
  for each row when (old.status is distinct from new.status or old.claim_token is distinct from new.claim_token)
  execute function audit.record_transition();
