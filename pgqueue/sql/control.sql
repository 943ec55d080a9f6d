-- name: pause_queue
-- Workers leave the queue alone from their next look on, within a second. The answer: has anybody heard of that queue?
WITH u AS (
  INSERT INTO pgqueue.queue AS q (name, paused) VALUES (%(name)s::text, %(paused)s::boolean)
  ON CONFLICT (name) DO UPDATE SET paused = excluded.paused WHERE q.paused IS DISTINCT FROM excluded.paused)
SELECT EXISTS (SELECT FROM pgqueue.queue q WHERE q.name = %(name)s::text)
    OR EXISTS (SELECT FROM pgqueue.job_type t WHERE t.queue = %(name)s::text)
    OR EXISTS (SELECT FROM pgqueue.worker w WHERE %(name)s::text = ANY (w.queues))
    OR EXISTS (SELECT FROM pgqueue.job j WHERE j.queue = %(name)s::text)

-- name: pause_name
-- As above for the jobs of one name, in every queue; NULL if there is no such job type.
UPDATE pgqueue.job_type t SET paused = %(paused)s::boolean WHERE t.name = %(name)s::text RETURNING true

-- name: names
SELECT t.name FROM pgqueue.job_type t ORDER BY t.name

-- name: queues
-- Every queue that anybody has heard of, with its sampled depth.
WITH n AS (
  SELECT q.name FROM pgqueue.queue q
  UNION SELECT t.queue FROM pgqueue.job_type t WHERE t.queue IS NOT NULL
  UNION SELECT d.queue FROM pgqueue.depth_sample d
  UNION SELECT u.name FROM pgqueue.worker w CROSS JOIN LATERAL unnest(w.queues) u(name) WHERE w.beat_at > now() - interval '30 s')
SELECT n.name, coalesce(q.paused, false),
  (SELECT count(*) FROM pgqueue.workers w WHERE w.alive AND n.name = ANY (w.queues)),
  g.ready, g.delayed, g.in_flight, g.blocked, g.oldest_ready_s, g.capped, g.sampled_s_ago,
  coalesce((SELECT array_agg(t.name ORDER BY t.name) FROM pgqueue.job_type t WHERE t.paused AND coalesce(t.queue, 'default') = n.name), '{}')
FROM n LEFT JOIN pgqueue.queue q ON q.name = n.name LEFT JOIN pgqueue.queue_gauge g ON g.queue = n.name ORDER BY n.name

-- name: unsampled
-- Queues that have jobs and no sample of the last half minute. Reads one index entry a queue, and up to 1,000 of the
-- delayed jobs.
WITH RECURSIVE plain AS (
  (SELECT j.queue FROM pgqueue.job j WHERE j.pos IS NOT NULL AND j.key IS NULL ORDER BY j.queue LIMIT 1)
  UNION ALL
  SELECT n.queue FROM plain p CROSS JOIN LATERAL (
    SELECT j.queue FROM pgqueue.job j WHERE j.pos IS NOT NULL AND j.key IS NULL AND j.queue > p.queue ORDER BY j.queue LIMIT 1) n),
keyed AS (
  (SELECT j.queue FROM pgqueue.job j WHERE j.pos IS NOT NULL AND j.key IS NOT NULL ORDER BY j.queue LIMIT 1)
  UNION ALL
  SELECT n.queue FROM keyed p CROSS JOIN LATERAL (
    SELECT j.queue FROM pgqueue.job j WHERE j.pos IS NOT NULL AND j.key IS NOT NULL AND j.queue > p.queue ORDER BY j.queue LIMIT 1) n)
SELECT u.queue FROM (
  SELECT plain.queue FROM plain UNION SELECT keyed.queue FROM keyed
  UNION SELECT s.queue FROM (SELECT j.queue FROM pgqueue.job j WHERE j.run_at IS NOT NULL ORDER BY j.run_at LIMIT 1000) s) u
WHERE NOT EXISTS (SELECT FROM pgqueue.depth_sample d WHERE d.queue = u.queue AND d.at > now() - interval '30 s')
ORDER BY u.queue
