-- name: define
-- Write the schedules of an app, in name order. Unchanged ones are not touched.
SELECT count(pgqueue.schedule_add(d.name, d.expr, d.job, d.payload, d.zone, d.jitter_s * interval '1 s', d.missed, d.cap, 'code'))
FROM (SELECT x.* FROM json_to_recordset(%(schedules)s::json) AS x(
        name text, expr text, job text, payload json, zone text, jitter_s double precision, missed text, cap int)
      ORDER BY x.name COLLATE "C") d

-- name: add
SELECT pgqueue.schedule_add(
  %(name)s::text, %(expr)s::text, %(job)s::text, %(payload)s::json, %(zone)s::text, %(jitter)s::interval, %(missed)s::text, %(cap)s::int)

-- name: remove
SELECT pgqueue.schedule_remove(%(name)s::text)

-- name: pause
SELECT pgqueue.schedule_pause(%(name)s::text, %(paused)s::boolean)

-- name: status
SELECT v.name, v.job, v.expr, v.zone, v.source, v.missed, v.jitter_s, v.state, v.next_at, v.last_at, v.late_s, v.problem
FROM pgqueue.schedule_status v ORDER BY v.name

-- name: due
-- Schedules with a tick that is due or not worked out yet, if it is this process's turn. A broken one is tried again once a minute.
WITH t AS MATERIALIZED (SELECT pgqueue.my_turn('schedule', %(period)s::interval) AS mine)
SELECT s.name, s.expr, s.zone, s.missed, s.cap, greatest(s.since, s.last_at), s.next_at, clock_timestamp()
FROM pgqueue.schedule s JOIN pgqueue.schedule_status v ON v.name = s.name
WHERE (SELECT t.mine FROM t) AND (s.next_at IS NULL OR s.next_at <= clock_timestamp())
  AND (v.state = 'active' OR (v.state = 'broken' AND s.problem_at NOT BETWEEN clock_timestamp() - interval '1 min' AND clock_timestamp()))
ORDER BY s.next_at NULLS FIRST LIMIT 100

-- name: settle
-- The first tick of a schedule that is new, changed or resumed.
UPDATE pgqueue.schedule s SET next_at = %(following)s::timestamptz, problem = NULL, problem_at = NULL
WHERE s.name = %(name)s::text AND s.expr = %(expr)s::text AND s.zone = %(zone)s::text AND s.next_at IS NULL
  AND greatest(s.since, s.last_at) = %(after)s::timestamptz

-- name: fire
SELECT f.tick, f.job_id FROM pgqueue.fire(%(name)s::text, %(expr)s::text, %(zone)s::text, %(expected)s::timestamptz,
  %(ticks)s::timestamptz[], %(through)s::timestamptz, %(following)s::timestamptz) f

-- name: broken
-- Why the ticks of a schedule cannot be worked out or written.
UPDATE pgqueue.schedule s SET problem = %(problem)s::text, problem_at = clock_timestamp()
WHERE s.name = %(name)s::text AND s.expr = %(expr)s::text AND s.zone = %(zone)s::text
