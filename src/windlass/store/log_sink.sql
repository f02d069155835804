-- Named queries of store/log_sink.py.

-- name: add_logs
-- Inserts a batch.
insert into windlass.logs (at, level, message, worker_id, cycle_id, fields)
select coalesce(l.at, windlass.now()), l.level, l.message, l.worker_id, l.cycle_id, l.fields
from jsonb_to_recordset($1::jsonb) as l (
  at timestamptz, level text, message text, worker_id text, cycle_id bigint, fields jsonb
);
