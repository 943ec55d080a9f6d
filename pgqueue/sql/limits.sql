-- name: limit_job
SELECT pgqueue.limit_job(%(name)s::text, %(slots)s::int, %(rate)s::double precision, %(key_slots)s::int, %(key_rate)s::double precision)

-- name: limit_queue
SELECT pgqueue.limit_queue(%(queue)s::text, %(slots)s::int, %(rate)s::double precision, %(burst)s::double precision)

-- name: as_declared
-- The next declaration of the job type decides about its limits again.
UPDATE pgqueue.job_type t SET limits_set = false WHERE t.name = %(name)s::text RETURNING true

-- name: limits
-- Whatever has a limit or a rate, and how many of its jobs are leased: those of a job type hold a lane each.
SELECT 'job', t.name, t.slots, t.rate_per_s, NULL::double precision, t.key_slots, t.key_rate_per_s,
  (SELECT count(*) FROM pgqueue.lane l WHERE l.lease <> 0 AND l.deadline > now() AND l.head_name = t.name AND pgqueue.is_limit(l.key, t.name)), t.limits_set
FROM pgqueue.job_type t WHERE num_nonnulls(t.slots, t.rate_per_s, t.key_slots, t.key_rate_per_s) > 0
UNION ALL
SELECT 'queue', q.name, q.slots, q.rate_per_s, CASE WHEN q.rate_per_s IS NOT NULL THEN coalesce(q.burst, greatest(1, q.rate_per_s)) END, NULL, NULL,
  (SELECT count(*) FROM pgqueue.permit p JOIN pgqueue.job j ON j.id = p.job_id AND j.lease <> 0 AND j.deadline > now() WHERE p.queue = q.name), false
FROM pgqueue.queue q WHERE num_nonnulls(q.slots, q.rate_per_s) > 0
ORDER BY 1, 2

-- name: gate
SELECT n, wait FROM pgqueue.gate(%(queue)s::text, %(want)s::int)

-- name: gate_pass
SELECT pgqueue.gate_pass(%(queue)s::text, %(ids)s::bigint[])

-- name: adopt
-- Jobs that were leased before their queue had a limit.
INSERT INTO pgqueue.permit (queue, job_id) SELECT j.queue, j.id FROM pgqueue.job j
WHERE j.id = ANY (%(ids)s::bigint[]) AND j.queue = %(queue)s::text AND j.lease <> 0 ORDER BY j.id ON CONFLICT DO NOTHING
