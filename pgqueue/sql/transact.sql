-- name: limits
-- The server ends a transaction that outlives its attempt; 0 = no limit.
SELECT pg_catalog.set_config('statement_timeout', %(ms)s::text, true),
       pg_catalog.set_config('idle_in_transaction_session_timeout', %(ms)s::text, true)
