-- name: lag
-- The depth of the outbox; exact, so it reads every unpublished row (26 ms at 300,000).
SELECT v.pending, v.parked, v.blocked_aggregates, v.oldest_pending_s, v.relays, v.orphan_partitions FROM pgqueue.outbox_lag v
