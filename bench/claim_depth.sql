-- A past of a million finished tasks, as their workers would have left them.
insert into windlass.tasks (queue, status, attempts, created_at, started_at, finished_at, claim_token, worker_id, payload, result)
select 'bench', 'complete', 1, t.at, t.at, t.at, gen_random_uuid(), 'worker-' || n % 10, jsonb_build_object('n', n), 'null'
from generate_series(1, 1000000) as n
cross join lateral (select now() - interval '6 days' + n * interval '0.5 seconds') as t (at);
