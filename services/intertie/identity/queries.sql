-- name: tenant_load
SELECT record, version FROM tenant WHERE tenant = $1

-- name: tenant_lock
SELECT record, version FROM tenant WHERE tenant = $1 FOR UPDATE

-- name: tenant_save
INSERT INTO tenant (tenant, record, version) VALUES ($1, $2, $3)
ON CONFLICT (tenant) DO UPDATE SET record = excluded.record, version = excluded.version

-- name: tenants
SELECT record, version FROM tenant ORDER BY tenant

-- name: token_load
SELECT record, digest FROM token WHERE id = $1

-- name: token_lock
SELECT record, digest FROM token WHERE id = $1 FOR UPDATE

-- name: token_save
INSERT INTO token (id, record, digest) VALUES ($1, $2, $3) ON CONFLICT (id) DO UPDATE SET record = excluded.record

-- name: tokens
-- Oldest first: ids sort by their making.
SELECT record, digest FROM token ORDER BY id

-- name: invitation_load
SELECT id, digest, record FROM invitation WHERE id = $1

-- name: invitation_lock
SELECT id, digest, record FROM invitation WHERE id = $1 FOR UPDATE

-- name: invitation_save
INSERT INTO invitation (id, digest, record) VALUES ($1, $2, $3) ON CONFLICT (id) DO UPDATE SET record = excluded.record

-- name: invitations_open
SELECT id, digest, record FROM invitation
WHERE site = $1 AND record ->> 'used_at' IS NULL AND record ->> 'withdrawn_at' IS NULL ORDER BY id FOR UPDATE

-- name: site_load
SELECT record FROM site_account WHERE site = $1

-- name: site_lock
SELECT record FROM site_account WHERE site = $1 FOR UPDATE

-- name: site_save
INSERT INTO site_account (site, record) VALUES ($1, $2) ON CONFLICT (site) DO UPDATE SET record = excluded.record

-- name: sites
SELECT record FROM site_account ORDER BY site

-- name: mappings
SELECT site, tenant, account FROM mapping ORDER BY site, tenant

-- name: mapping_save
INSERT INTO mapping (site, tenant, account) VALUES ($1, $2, $3) ON CONFLICT (site, tenant) DO UPDATE SET account = excluded.account

-- name: mapping_remove
DELETE FROM mapping WHERE site = $1 AND tenant = $2

-- name: mapping_version
SELECT version FROM mapping_version WHERE site = $1 FOR UPDATE

-- name: mapping_version_save
INSERT INTO mapping_version (site, version) VALUES ($1, $2) ON CONFLICT (site) DO UPDATE SET version = excluded.version

-- name: mapping_versions
SELECT site, version FROM mapping_version ORDER BY site

-- name: versions_lift
WITH tenants AS (UPDATE tenant SET version = $1 WHERE version < $1),
    mappings AS (UPDATE mapping_version SET version = $1 WHERE version < $1)
UPDATE site_account SET record = jsonb_set(record, '{version}', to_jsonb($1::bigint)) WHERE coalesce((record ->> 'version')::bigint, 1) < $1

-- name: anchor_lock
-- One anchor of a service at a time; freed with the transaction.
SELECT pg_advisory_xact_lock(hashtextextended(current_schema() || ':anchor:' || $1, 0))

-- name: anchor_last
SELECT nth, anchor FROM audit_anchor WHERE service = $1 ORDER BY nth DESC LIMIT 1

-- name: anchor_add
INSERT INTO audit_anchor (service, epoch, number, nth, anchor) VALUES ($1, $2, $3, $4, $5)

-- name: anchors_newest
SELECT DISTINCT ON (service) anchor FROM audit_anchor ORDER BY service, nth DESC

-- name: anchors_page
SELECT anchor FROM audit_anchor WHERE service = $1 AND (epoch, number) > ($2, $3) ORDER BY epoch, number LIMIT $4
