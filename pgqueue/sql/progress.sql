-- name: progress
-- How far running jobs are, fenced by lease. For people who look: nothing rests on it.
INSERT INTO pgqueue.progress AS p (job_id, lease, fraction, note)
SELECT j.id, j.lease, x.fraction, x.note
FROM unnest(%(ids)s::bigint[], %(leases)s::bigint[], %(fractions)s::real[], %(notes)s::text[]) x(id, lease, fraction, note)
JOIN pgqueue.job j ON j.id = x.id AND j.lease = x.lease ORDER BY j.id
ON CONFLICT (job_id) DO UPDATE SET lease = excluded.lease, fraction = excluded.fraction, note = excluded.note, at = clock_timestamp()

-- name: checkpoint
SELECT pgqueue.checkpoint(%(id)s::bigint, %(lease)s::bigint, %(state)s::json)

-- name: state
SELECT p.state::text FROM pgqueue.progress p WHERE p.job_id = %(id)s::bigint

-- name: prune
-- Progress of jobs that are done; a dead letter keeps its checkpoint for a replay.
DELETE FROM pgqueue.progress p WHERE p.job_id = ANY (ARRAY(
  SELECT g.job_id FROM pgqueue.progress g
  WHERE NOT EXISTS (SELECT FROM pgqueue.job j WHERE j.id = g.job_id) AND NOT EXISTS (SELECT FROM pgqueue.dead_job d WHERE d.id = g.job_id) LIMIT 1000))
