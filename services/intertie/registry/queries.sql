-- name: site_lock
SELECT record FROM site WHERE site = $1 FOR UPDATE

-- name: site_save
INSERT INTO site (site, record) VALUES ($1, $2) ON CONFLICT (site) DO UPDATE SET record = excluded.record

-- name: doubled_load
SELECT doubled FROM site WHERE site = $1

-- name: doubled_save
UPDATE site SET doubled = $2 WHERE site = $1

-- name: pools_lock
SELECT record, told_version, told_at FROM pool WHERE site = $1 ORDER BY pool FOR UPDATE

-- name: pool_save
INSERT INTO pool (site, pool, record, told_version, told_at) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (site, pool) DO UPDATE SET record = excluded.record, told_version = excluded.told_version, told_at = excluded.told_at

-- name: pools_untold
-- Rows that another transaction holds are told by it, or with the next beat.
SELECT record, told_version, told_at FROM pool WHERE told_version < (record ->> 'version')::bigint
ORDER BY site, pool LIMIT $1 FOR UPDATE SKIP LOCKED

-- name: revision_add
INSERT INTO profile_revision (site, pool, revision, profile, declared_by, declared_at, effective_at) VALUES ($1, $2, $3, $4, $5, $6, $7)

-- name: sites_find
SELECT record FROM site WHERE $1::text IS NULL OR site = $1 ORDER BY site

-- name: pools_find
SELECT record FROM pool WHERE $1::text IS NULL OR site = $1 ORDER BY site, pool
