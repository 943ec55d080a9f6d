-- name: age
-- Jobs that have waited long go up one priority, where a queue asks for that and it is this process's turn.
SELECT pgqueue.age() FROM (SELECT EXISTS (SELECT FROM pgqueue.queue q WHERE q.age_after_s IS NOT NULL) AS wanted) w
WHERE CASE WHEN w.wanted THEN pgqueue.my_turn('age', %(period)s::interval) ELSE false END

-- name: age_queue
-- How long a job of this queue waits until it goes up one priority; NULL: for ever.
INSERT INTO pgqueue.queue AS q (name, age_after_s) VALUES (%(queue)s::text, %(after)s::double precision)
ON CONFLICT (name) DO UPDATE SET age_after_s = excluded.age_after_s
