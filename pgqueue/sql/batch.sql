-- name: enqueue
-- Jobs together with the job that runs when all of them are done, in the caller's transaction. The first row is the batch's.
SELECT b.batch, b.job, b.full_queue FROM pgqueue.enqueue_batch(%(steps)s::json, %(completion)s::json, 'tell') b

-- name: fold
-- Count the members that ended; enqueue the completion jobs of whole batches.
SELECT pgqueue.fold_batches()

-- name: look
-- One batch: how many of its members have ended.
SELECT b.id, b.size, b.done, b.gone, b.unfinished, b.job_id, b.completed_at, b.problem FROM pgqueue.batch_status b WHERE b.id = %(id)s::bigint

-- name: prune
-- Batches that completed long ago.
DELETE FROM pgqueue.batch b WHERE b.id = ANY (ARRAY(
  SELECT o.id FROM pgqueue.batch o WHERE o.completed_at < now() - interval '7 days' ORDER BY o.completed_at LIMIT 1000))
