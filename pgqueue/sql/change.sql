-- name: reprioritise
-- Another priority for jobs that wait.
SELECT c.id, c.state FROM pgqueue.reprioritise(%(ids)s::bigint[], %(priority)s::int) c

-- name: move
-- Another queue for jobs that wait.
SELECT c.id, c.state FROM pgqueue.move(%(ids)s::bigint[], %(queue)s::text) c

-- name: edit
-- Another payload for one job that waits, or a dead letter.
SELECT pgqueue.edit(%(id)s::bigint, %(payload)s::json)
