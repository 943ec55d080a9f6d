-- name: status
-- Where a job is, in one snapshot: live, dead, or kept in the history.
SELECT s.state, s.name, s.queue, s.attempt, s.max_attempts, s.enqueued_at, s.run_at, s.started_at, s.finished_at, s.fraction::double precision, s.note,
  s.result::text, s.problem, s.error_type, s.error
FROM pgqueue.status(%(id)s::bigint) s

-- name: days
SELECT pgqueue.history_days()
