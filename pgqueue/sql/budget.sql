-- name: draw
-- Report executions and take retry tokens, one row a queue. A token comes for every tenth execution or every second,
-- whichever is more; a minute's worth can be saved up. Returns (queue, tokens granted).
INSERT INTO pgqueue.budget AS b (queue, tokens, granted, at)
SELECT r.queue, 60 - least(r.want, 60), least(r.want, 60), clock_timestamp()
FROM json_to_recordset(%(reports)s::json) AS r(queue text, ran int, want int) ORDER BY r.queue COLLATE "C"
ON CONFLICT (queue) DO UPDATE SET (tokens, granted, at) = (
  SELECT f.had - f.take, f.take, clock_timestamp()
  FROM (SELECT s.had, least(r.want, floor(s.had)) AS take
        FROM json_to_recordset(%(reports)s::json) AS r(queue text, ran int, want int)
        CROSS JOIN LATERAL (SELECT greatest(extract(epoch FROM clock_timestamp() - b.at)::double precision, 0) AS age) e
        CROSS JOIN LATERAL (SELECT least(greatest(60, 0.1 * r.ran), b.tokens + greatest(e.age, 0.1 * r.ran)) AS had) s
        WHERE r.queue = b.queue) f)
RETURNING b.queue, b.granted::int
