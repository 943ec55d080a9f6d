-- Which revision of the schema is installed. Works for every role: the catalog is readable by all.

-- name: version_table
SELECT current_database(),
       pg_catalog.has_schema_privilege(n.oid, 'USAGE') AND pg_catalog.has_table_privilege(c.oid, 'SELECT'),
       pg_catalog.obj_description(c.oid, 'pg_class')
FROM (SELECT) AS one
LEFT JOIN pg_catalog.pg_namespace n ON n.nspname = 'pgqueue'
LEFT JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = 'alembic_version'

-- name: revisions
SELECT version_num FROM pgqueue.alembic_version
