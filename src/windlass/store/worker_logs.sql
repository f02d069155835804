-- Named queries of store/worker_logs.py.

-- name: log_tail_{worker|task}
-- The newest chunks, as many as hold the wanted lines; worker_logs_worker or worker_logs_task, backwards.
select t.id, t.worker_id, t.task_id, t.attempt, t.source, t.at, t.ages_ms, t.body, t.dropped_lines, t.lines
from (
  select
    l.id, l.worker_id, l.task_id, l.attempt, l.source, l.at, l.ages_ms, l.body, l.dropped_lines, l.lines,
    sum(l.lines) over newer - l.lines as newer_lines, sum(l.size_bytes) over newer - l.size_bytes as newer_bytes
  from windlass_internal.worker_logs l
  where l.{variant}_id = $1 and ($2::integer is null or l.attempt = $2)
  window newer as (order by l.id desc)
  order by l.id desc limit $5
) as t
where t.newer_lines < $3 and t.newer_bytes < $4
order by t.id;

-- name: log_after_{worker|task}
-- Chunks since a cursor; the same indexes.
select t.id, t.worker_id, t.task_id, t.attempt, t.source, t.at, t.ages_ms, t.body, t.dropped_lines, t.lines
from (
  select
    l.id, l.worker_id, l.task_id, l.attempt, l.source, l.at, l.ages_ms, l.body, l.dropped_lines, l.lines,
    sum(l.lines) over older - l.lines as older_lines, sum(l.size_bytes) over older - l.size_bytes as older_bytes
  from windlass_internal.worker_logs l
  where l.{variant}_id = $1 and ($2::integer is null or l.attempt = $2) and l.id > $6 and l.source = 'worker'
  window older as (order by l.id)
  order by l.id limit $5
) as t
where t.older_lines < $3 and t.older_bytes < $4
order by t.id;

-- name: deleted_lines
-- Primary key.
select t.deleted_lines from windlass_internal.worker_log_totals t where t.worker_id = $1;

-- name: diagnostics
-- Primary key.
select d.diagnostics from windlass_internal.diagnostics d where d.worker_id = $1;
