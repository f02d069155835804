-- Data for tools/page_screenshots.py: two rented fleets as database rows, in two currencies, with a hold, failures and
-- a week of history; a fleet of Ray nodes; and workers that were started by hand. The local fleet `renders` is real.

insert into windlass.fleets (name, provider, queues, min_workers, max_workers, created_at, planner_state)
values
  ('crunch', 'hetzner', '{encode,thumbnails}', 1, 12, now() - interval '40 days',
    jsonb_build_object('cadence', jsonb_build_object('planned_at', now(), 'next_plan_in_s', 3600))),
  ('gpus', 'runpod', '{upscale}', 0, 8, now() - interval '20 days',
    jsonb_build_object(
      'cadence', jsonb_build_object('planned_at', now(), 'next_plan_in_s', 3600),
      'hold', jsonb_build_object(
        'code', 'FAILURE_RATE', 'reason', 'failure rate 4 of 5 in 10 min', 'since', now() - interval '7 minutes',
        'is_total', false)));
insert into windlass.slots (fleet, slot, status, restart_count)
select 'crunch', s, case s when 7 then 'failed' else 'ok' end, case when s in (2, 7) then 5 else 0 end
from generate_series(0, 8) as s;
insert into windlass.slots (fleet, slot) select 'gpus', generate_series(0, 3);

insert into windlass.workers (
  id, fleet, slot, status, queues, created_at, activated_at, last_heartbeat, lease_s, instance_type, place, machine_id,
  host, version, provider, price_micros_per_hour, currency, billing_unit_s, billed_since, first_claimed_at,
  settle_at
)
select 'crunch-' || s || '-' || left(md5(s::text), 6), 'crunch', s,
  case s when 5 then 'spawning' when 6 then 'terminating' else 'active' end, '{encode,thumbnails}',
  now() - interval '52 minutes' + s * interval '1 minute',
  case s when 5 then null else now() - interval '50 minutes' end, case s when 5 then null else now() end, 86400, 'cpx41',
  'nbg1', '5511' || s, '10.0.0.' || 10 + s, '1.0.0', 'hetzner', 46800, 'EUR', 3600,
  now() - interval '52 minutes' + s * interval '1 minute', now() - interval '49 minutes', now() + interval '1 hour'
from generate_series(0, 6) as s;
insert into windlass.workers (
  id, fleet, slot, status, queues, created_at, activated_at, last_heartbeat, lease_s, instance_type, place, machine_id,
  provider, vram_total_mb, vram_used_mb, price_micros_per_hour, currency, billing_unit_s, billed_since, settle_at
)
select 'gpus-' || s || '-' || left(md5('g' || s), 6), 'gpus', s, 'active', '{upscale}', now() - interval '3 hours',
  now() - interval '175 minutes', now(), 86400, 'NVIDIA RTX 4090', 'EU-RO-1', 'pod-' || left(md5('m' || s), 10), 'runpod',
  24576, 23900 - 9000 * s, 690000, 'USD', 1, now() - interval '3 hours', now() + interval '1 hour'
from generate_series(0, 2) as s;
insert into windlass.workers (
  id, fleet, slot, status, queues, created_at, activated_at, terminated_at, code, reason, instance_type, last_heartbeat,
  failed_at
)
select 'gpus-3-' || left(md5('t' || s), 6), 'gpus', 3, 'terminated', '{upscale}', now() - s * interval '20 minutes',
  now() - s * interval '19 minutes', now() - s * interval '15 minutes',
  case when s < 5 then 'CRASHED' else 'IDLE' end,
  case when s < 5 then 'no heartbeat for 612 s' else 'idle 61 s, 4 workers, 2 needed' end, 'NVIDIA RTX 4090',
  now() - s * interval '15 minutes', case when s < 5 then now() - s * interval '15 minutes' end
from generate_series(1, 9) as s;

-- Ray nodes in each state, and their dispatcher.
insert into windlass.fleets (name, provider, queues, min_workers, max_workers, created_at, planner_state)
values (
  'science', 'ray-local', '{fits}', 1, 4, now() - interval '3 days',
  jsonb_build_object('cadence', jsonb_build_object('planned_at', now(), 'next_plan_in_s', 3600)));
insert into windlass.slots (fleet, slot) select 'science', generate_series(0, 2);
insert into windlass.workers (
  id, fleet, slot, status, kind, queues, concurrency, created_at, activated_at, last_heartbeat, lease_s, host, pid,
  machine_id, node
)
select 'science-' || s || '-' || left(md5('r' || s), 6), 'science', s, case s when 2 then 'spawning' else 'active' end,
  'node', '{fits}', 4, now() - interval '40 minutes', case s when 2 then null else now() - interval '39 minutes' end,
  now(), 86400, 'ray-host-' || s, 4100 + s, 'process-' || 4100 + s,
  n.node || jsonb_build_object('at', now(), 'since', now() - interval '39 minutes')
from (
  values
    (0, '{"state": "alive", "node_id": "5f3a", "total": {"CPU": 8, "GPU": 1, "memory": 34359738368, "scratch": 2},
      "used": {"CPU": 6, "GPU": 0.5, "memory": 12884901888}}'::jsonb),
    (1, '{"state": "dead", "node_id": "9c1e", "note": "its raylet was killed: out of memory"}'),
    (2, '{"state": "absent"}')
) as n (s, node);
insert into windlass.workers (
  id, fleet, status, kind, queues, concurrency, created_at, activated_at, last_heartbeat, lease_s, host, pid, metadata
)
values (
  'science-dispatcher', 'science', 'active', 'dispatcher', '{fits}', 64, now() - interval '40 minutes',
  now() - interval '40 minutes', now(), 86400, 'ray-host-0', 4000, '{"ray_dashboard": "http://127.0.0.1:8265"}');

-- Workers of `windlass worker`, in the fleet that the first of them created.
insert into windlass.fleets (name) values ('default');
insert into windlass.workers (
  id, fleet, status, queues, created_at, activated_at, last_heartbeat, lease_s, host, pid, version
)
select 'laptop-' || pid || '-7c21d4', 'default', 'active', '{mails}', now() - interval '26 minutes',
  now() - interval '26 minutes', now(), 86400, 'laptop', pid, '1.0.0'
from (values (811), (812)) as p (pid);

-- Tasks: complete, running, queued, failed, cancelled, scheduled, retrying, and some in a queue that nothing serves.
insert into windlass.tasks (queue, status, attempts, payload, created_at, started_at, finished_at, worker_id, result)
select
  (array['encode', 'thumbnails', 'upscale'])[1 + n % 3], 'complete', 1,
  jsonb_build_object('video', 's3://media/in/' || left(md5(n::text), 12) || '.mp4', 'preset', 'h265-1080p'),
  t.at - interval '40 s', t.at - interval '20 s', t.at,
  (array['crunch-0-' || left(md5('0'), 6), 'crunch-1-' || left(md5('1'), 6), 'gpus-0-' || left(md5('g0'), 6)])[1 + n % 3],
  '{"bytes": 18211904}'
from generate_series(1, 400) as n
cross join lateral (select now() - n * interval '3 s' as at) as t;
insert into windlass.tasks (
  queue, status, attempts, payload, created_at, started_at, worker_id, claim_token, progress, progress_note
)
select
  case when w.fleet = 'gpus' then 'upscale' else 'encode' end, 'running', 1,
  jsonb_build_object('video', 's3://media/in/' || left(md5(w.id), 12) || '.mp4', 'scale', 4),
  now() - interval '5 minutes', now() - interval '70 s', w.id, gen_random_uuid(), 0.1 * (1 + w.slot),
  'frame ' || 120 * (1 + w.slot) || ' of 1200'
from windlass.workers w where w.fleet in ('crunch', 'gpus') and w.status = 'active';
insert into windlass.tasks (
  queue, status, attempts, payload, created_at, started_at, worker_id, claim_token, progress, progress_note
)
select 'fits', 'running', 1, jsonb_build_object('fold', n, 'model', 'gradient-boosting'), now() - interval '3 minutes',
  now() - interval '50 s', 'science-0-' || left(md5('r0'), 6), gen_random_uuid(), 0.2 * n, 'fold ' || n || ' of 5'
from generate_series(1, 3) as n;
insert into windlass.tasks (queue, payload, created_at, priority)
select
  'upscale', jsonb_build_object('image', 'frames/' || n || '.png', 'scale', 4, 'model', 'realesrgan-x4plus'),
  now() - interval '6 minutes' - n * interval '1 s', n % 3
from generate_series(1, 130) as n;
insert into windlass.tasks (queue, payload, created_at)
select 'encode', jsonb_build_object('video', 'a.mp4', 'preset', 'av1', 'customer', 'acme-' || n), now() - n * interval '2 s'
from generate_series(1, 24) as n;
insert into windlass.tasks (queue, payload, created_at, unique_key)
select 'thumnails', jsonb_build_object('video', 'b' || n || '.mp4'), now() - interval '25 minutes', 'order-47' || n
from generate_series(1, 3) as n;
insert into windlass.tasks (queue, payload, created_at, run_after)
select 'encode', jsonb_build_object('video', 'nightly-' || n || '.mp4'), now(), now() + n * interval '3 hours'
from generate_series(1, 4) as n;
insert into windlass.tasks (
  queue, status, attempts, payload, created_at, started_at, finished_at, worker_id, error_code, error
)
select
  'upscale', 'failed', 3, jsonb_build_object('image', 'frames/9' || n || '.png', 'scale', 8),
  now() - interval '50 minutes', now() - n * interval '4 minutes' - interval '9 s', now() - n * interval '4 minutes',
  'gpus-0-' || left(md5('g0'), 6), 'HANDLER_ERROR',
  E'Traceback (most recent call last):\n  File "upscale.py", line 41, in run\n    out = model(tile)\n'
    'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.96 GiB (GPU 0; 23.65 GiB total)'
from generate_series(1, 6) as n;
insert into windlass.tasks (queue, status, attempts, payload, created_at, finished_at, error_code, error)
values ('encode', 'failed', 0, '{"video": "c.mp4"}', now() - interval '2 hours', now() - interval '1 hour', 'CANCELLED',
  'cancelled by an operator');
insert into windlass.tasks (
  queue, status, attempts, payload, created_at, started_at, finished_at, run_after, worker_id, error_code, error
)
values ('encode', 'error', 1, '{"video": "broken.mp4", "preset": "av1"}', now() - interval '3 minutes',
  now() - interval '30 s', now() - interval '20 s', now() + interval '40 s', 'crunch-2-' || left(md5('2'), 6),
  'TIMEOUT', 'the attempt ran for more than 600 s');
insert into windlass.events (at, code, reason, worker_id, task_id, detail)
select
  t.finished_at - (3 - a) * interval '6 minutes', case a when 3 then 'TASK_FAILED' else 'TASK_ERROR' end,
  'attempt ' || a || ' of 3: torch.OutOfMemoryError: CUDA out of memory', 'gpus-' || (a % 2) || '-' || left(md5('g' || a % 2), 6),
  t.id, jsonb_build_object('attempt', a, 'error_code', 'HANDLER_ERROR', 'error', t.error)
from windlass.tasks t cross join generate_series(1, 3) as a where t.queue = 'upscale' and t.status = 'failed';
insert into windlass.events (at, code, reason, worker_id, task_id, detail)
select
  now() - t.id % 50 * interval '1 minute', 'TASK_ERROR', 'attempt 1 of 3: CUDA error: device-side assert triggered',
  'gpus-1-' || left(md5('g1'), 6), t.id,
  jsonb_build_object(
    'attempt', 1, 'error_code', 'HANDLER_ERROR',
    'error', E'Traceback (most recent call last):\n  ...\nRuntimeError: CUDA error: device-side assert triggered')
from windlass.tasks t where t.queue = 'upscale' and t.status = 'complete' and t.id % 10 = 0;

-- Decisions of the last day, samples of the last hour and averages of a week.
insert into windlass.cycles (fleet, term, started_at, finished_at, snapshot, plan, decision, is_change)
select
  'crunch', 3, c.at, c.at, (select r.snapshot from windlass.cycles r where r.fleet = 'renders' order by r.id limit 1), '[]',
  case n % 5
    when 0 then 'spawn ' || 1 + n % 3 || ': ' || 40 + n || ' queued, 0 free slots, target 5'
    when 3 then 'drain 2: idle 61 s, ' || 4 + n % 4 || ' workers, ' || 2 + n % 4 || ' needed'
    else 'steady: ' || n || ' queued, ' || 4 + n % 4 || ' of 12 workers busy'
  end,
  n % 5 in (0, 1, 3)
from generate_series(60, 1, -1) as n
cross join lateral (select now() - n * interval '11 minutes' as at) as c;
insert into windlass.cycles (fleet, term, started_at, finished_at, snapshot, plan, decision, is_change)
select
  d.fleet, 3, now(), now(), (select r.snapshot from windlass.cycles r where r.fleet = 'renders' order by r.id limit 1),
  '[]', d.decision, true
from (
  values
    ('gpus', 'hold: failure rate 4 of 5 in 10 min; would spawn 3: 130 queued, 3 busy'),
    ('science', 'no change: 0 queued, 1 busy, 1 idle, 1 starting, idle timeout 60 s')
) as d (fleet, decision);
insert into windlass.samples (
  fleet, at, queued, running, spawning, active, terminating, error, completed_per_minute, wait_p95_s,
  burn_micros_per_hour, currency
)
select f.fleet, s.at, greatest(0, f.base + f.base * sin(s.n / 90.0)), f.workers, (s.n / 60) % 3, f.workers,
  case when s.n % 200 < 20 then 1 else 0 end, 0, 12 + 6 * cos(s.n / 70.0), 30, f.micros * f.workers, f.currency
from (select n, date_bin('5 s', now(), 'epoch') - n * interval '5 s' as at from generate_series(1, 720) as n) as s
cross join lateral (
  values ('crunch', 30, 4 + (720 - s.n) / 200, 46800, 'EUR'), ('gpus', 80, 2 + (s.n / 300) % 3, 690000, 'USD')
) as f (fleet, base, workers, micros, currency);
insert into windlass.sample_averages (
  fleet, at, queued, running, spawning, active, terminating, error, completed_per_minute, wait_p95_s,
  burn_micros_per_hour, currency
)
select f.fleet, s.at, greatest(0, f.base * (1 + sin(s.n / 46.0))), f.workers, 0.3, f.workers, 0.1, 0, 14, 40,
  f.micros * f.workers, f.currency
from (
  select n, date_bin('5 minutes', now(), 'epoch') - n * interval '5 minutes' as at from generate_series(13, 2016) as n
) as s
cross join lateral (
  values ('crunch', 30, 3 + 3 * (1 + sin(s.n / 46.0)), 46800, 'EUR'), ('gpus', 70, 2 + cos(s.n / 60.0), 690000, 'USD')
) as f (fleet, base, workers, micros, currency);

-- Cost of the last twelve days.
insert into windlass.spending (fleet, hour, currency, queue, task_micros, boot_micros, idle_micros, tail_micros)
select f.fleet, date_trunc('hour', now()) - h * interval '1 hour', f.currency, f.queue, f.task * (2 + sin(h / 4.0)), 0, 0, 0
from generate_series(1, 280) as h
cross join (
  values ('crunch', 'EUR', 'encode', 130000), ('crunch', 'EUR', 'thumbnails', 42000), ('gpus', 'USD', 'upscale', 780000)
) as f (fleet, currency, queue, task);
insert into windlass.spending (fleet, hour, currency, queue, task_micros, boot_micros, idle_micros, tail_micros)
select f.fleet, date_trunc('hour', now()) - h * interval '1 hour', f.currency, '', 0, f.boot, f.idle, f.tail
from generate_series(1, 280) as h
cross join (values ('crunch', 'EUR', 9000, 24000, 31000), ('gpus', 'USD', 60000, 110000, 0)) as f (fleet, currency, boot, idle, tail);

insert into windlass.alerts (fleet, key, code, severity, reason, since, seen_at)
values
  ('gpus', 'FAILURE_RATE', 'FAILURE_RATE', 'critical', 'failure rate 4 of 5 in 10 min', now() - interval '7 minutes',
    now() + interval '1 day'),
  ('crunch', 'SLOT_FAILED 7', 'SLOT_FAILED', 'critical',
    'slot 7 is failed and stays empty until `windlass restart`: 5 failures in 5 min', now() - interval '31 minutes',
    now() + interval '1 day'),
  (null, 'DEAD_LETTERS upscale', 'DEAD_LETTERS', 'warning', '6 tasks in queue upscale failed permanently in the last hour',
    now() - interval '21 minutes', now() + interval '1 day');

-- A week of renders for the page "What if": deleted at once, so that only their history is left.
insert into windlass.tasks (queue, status, created_at, started_at, finished_at)
select 'renders', 'complete', t.at, t.at + interval '2 s', t.at + interval '2 s' + t.duration_s * interval '1 s'
from (
  select
    now() - interval '7 days' + make_interval(secs => 200 * n + 86400 * 0.3 * sin(n / 68.0)) as at,
    20 + 300 * power(random(), 4) as duration_s
  from generate_series(60, 2950) as n
) as t
where t.at < now() - interval '10 minutes';
delete from windlass.tasks where queue = 'renders' and status = 'complete' and finished_at < now();
