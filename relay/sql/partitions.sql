-- name: beat
-- Renews the lease of this relay, or announces it.
INSERT INTO pgqueue.relay (id, name, lease_until) VALUES (%(me)s::uuid, %(name)s::text, clock_timestamp() + %(lease)s::interval)
ON CONFLICT (id) DO UPDATE SET lease_until = EXCLUDED.lease_until

-- name: share
-- How many relays are alive, how many partitions there are.
SELECT (SELECT count(*) FROM pgqueue.relay r WHERE r.lease_until > clock_timestamp()), (SELECT count(*) FROM pgqueue.relay_partition)

-- name: take
-- Takes at most n partitions that nobody alive owns; a relay without a live lease of its own takes none.
WITH free AS MATERIALIZED (
  SELECT p.part FROM pgqueue.relay_partition p
  WHERE (p.owner IS NULL OR NOT EXISTS (SELECT FROM pgqueue.relay r WHERE r.id = p.owner AND r.lease_until > clock_timestamp()))
    AND EXISTS (SELECT FROM pgqueue.relay r WHERE r.id = %(me)s::uuid AND r.lease_until > clock_timestamp())
  ORDER BY random() LIMIT %(n)s::int FOR UPDATE SKIP LOCKED)
UPDATE pgqueue.relay_partition t SET owner = %(me)s::uuid FROM free WHERE t.part = free.part
RETURNING t.part

-- name: give
-- Gives partitions back, those that are still ours.
UPDATE pgqueue.relay_partition SET owner = NULL WHERE owner = %(me)s::uuid AND part = ANY (%(parts)s::smallint[])

-- name: leave
-- Gives everything back and ends the lease.
WITH given AS (UPDATE pgqueue.relay_partition SET owner = NULL WHERE owner = %(me)s::uuid)
DELETE FROM pgqueue.relay WHERE id = %(me)s::uuid

-- name: forget
-- Deletes relays that ended without leaving, long after their lease.
DELETE FROM pgqueue.relay WHERE lease_until < clock_timestamp() - interval '1 hour'
