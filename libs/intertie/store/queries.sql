-- name: system_ping
-- Proves that the server answers.
SELECT 1 AS one

-- name: epoch_load
SELECT epoch FROM service_epoch

-- name: epoch_whole
SELECT epoch, reason, raised_at, system_identifier, timeline FROM service_epoch

-- name: epoch_lock
SELECT epoch, reason, raised_at, system_identifier, timeline FROM service_epoch FOR UPDATE

-- name: epoch_place
-- The timeline of the WAL that is written now: the control file tells that of the last checkpoint, which may lie before a promotion.
SELECT system_identifier,
    CASE WHEN pg_is_in_recovery() THEN NULL
        ELSE ('x' || lpad(left(pg_walfile_name(pg_current_wal_lsn()), 8), 16, '0'))::bit(64)::bigint END AS timeline
FROM pg_control_system()

-- name: epoch_placed
UPDATE service_epoch SET system_identifier = $1, timeline = $2

-- name: epoch_raise
UPDATE service_epoch SET epoch = $1, reason = $2, raised_at = $3, system_identifier = $4, timeline = $5

-- name: epoch_faults
-- Faults have no rows to lift: their numbers begin anew, above all that were given.
SELECT setval('fault_version', greatest($1, last_value + 1), false) FROM fault_version

-- name: epoch_told
-- What sites say they have taken: the way by which a hub learns of epochs that its restored database has forgotten.
SELECT site, max(greatest(instruction_epoch, epoch_told)) AS epoch FROM lane_site GROUP BY site ORDER BY site

-- name: epoch_sessions
-- Other processes of this service that are connected.
SELECT count(*) AS number FROM pg_stat_activity
WHERE pid <> pg_backend_pid() AND application_name = $1 AND datname = current_database()

-- name: leader_dismiss
DELETE FROM leader

-- name: outbox_insert
INSERT INTO outbox (event_id, type, noun, entity, version, subject, body, headers, created_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)

-- name: outbox_number
-- Number what is committed and has no number, gapless per (epoch, noun). The caller holds the relay's fence, so this runs in one place at a time;
-- rows that commit later, whatever their id, are found by the next call.
WITH fresh AS (
    SELECT id, noun, row_number() OVER (PARTITION BY noun ORDER BY id) AS nth
    FROM (SELECT id, noun FROM outbox WHERE number IS NULL ORDER BY id LIMIT $1) AS unnumbered
), raised AS (
    INSERT INTO outbox_head AS head (noun, epoch, number)
    SELECT fresh.noun, e.epoch, max(fresh.nth) FROM fresh CROSS JOIN service_epoch AS e GROUP BY fresh.noun, e.epoch
    ON CONFLICT (noun, epoch) DO UPDATE SET number = head.number + excluded.number
    RETURNING noun, epoch, number
), sizes AS (
    SELECT noun, max(nth) AS size FROM fresh GROUP BY noun
)
UPDATE outbox AS o SET epoch = raised.epoch, number = raised.number - sizes.size + fresh.nth
FROM fresh JOIN raised USING (noun) JOIN sizes USING (noun)
WHERE o.id = fresh.id

-- name: outbox_due
-- Whether there is anything to take: asked before the fence, whose row lock alone makes a commit that is written and synced.
SELECT EXISTS (SELECT FROM outbox WHERE number IS NULL)
    OR EXISTS (SELECT FROM outbox WHERE generation = 0)
    OR EXISTS (SELECT FROM outbox WHERE generation > 0 AND generation < $1 AND created_at >= $2) AS due

-- name: outbox_fresh
-- Numbered, and acknowledged by no stream ever.
SELECT id, event_id, type, noun, entity, version, subject, body, headers, created_at, epoch, number
FROM outbox WHERE generation = 0 AND number IS NOT NULL ORDER BY id LIMIT $1

-- name: outbox_lost
-- Acknowledged by a stream that is gone.
SELECT id, event_id, type, noun, entity, version, subject, body, headers, created_at, epoch, number
FROM outbox WHERE generation > 0 AND generation < $1 AND created_at >= $2 ORDER BY generation, id LIMIT $3

-- name: outbox_published
UPDATE outbox SET generation = $2, published_at = $3 WHERE id = any($1::bigint[])

-- name: outbox_heads
-- The last number of each noun in its latest epoch.
SELECT DISTINCT ON (noun) noun, epoch, number FROM outbox_head ORDER BY noun, epoch DESC

-- name: outbox_prune
DELETE FROM outbox WHERE id IN (
    SELECT id FROM outbox WHERE created_at < $1 AND generation > 0 ORDER BY created_at LIMIT $2
)

-- name: inbox_prune
DELETE FROM inbox WHERE (event_id, consumer) IN (
    SELECT event_id, consumer FROM inbox WHERE applied_at < $1 ORDER BY applied_at LIMIT $2
)

-- name: stream_mark_load
SELECT stream, generation, created, head FROM stream_mark WHERE stream = $1

-- name: stream_mark_renew
-- The stream was lost or is met for the first time: a new generation, in which nothing has been published.
INSERT INTO stream_mark AS mark (stream, generation, created, head, seen_at) VALUES ($1, 1, $2, $3, $4)
ON CONFLICT (stream) DO UPDATE SET generation = mark.generation + 1, created = excluded.created, head = excluded.head, seen_at = excluded.seen_at
RETURNING stream, generation, created, head

-- name: stream_mark_head
UPDATE stream_mark SET head = greatest(head, $2), seen_at = $3 WHERE stream = $1

-- name: inbox_insert
INSERT INTO inbox (event_id, consumer) VALUES ($1, $2) ON CONFLICT DO NOTHING

-- name: dead_letter_insert
INSERT INTO dead_letter (consumer, event_id, type, subject, headers, body, error, tries, at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)

-- name: dead_letters_open
SELECT id, consumer, event_id, type, subject, headers, body, error, tries, at FROM dead_letter
WHERE replayed_at IS NULL ORDER BY id LIMIT $1

-- name: fault_next_version
SELECT nextval('fault_version') AS version

-- name: audit_insert
INSERT INTO audit (at, actor, action, target, reason, result, trace_id) VALUES ($1, $2, $3, $4, $5, $6, $7)

-- name: audit_read
-- Newest first, those before an id.
SELECT id, at, actor, action, target, reason, result, trace_id FROM audit
WHERE ($2::bigint IS NULL OR id < $2) ORDER BY id DESC LIMIT $1

-- name: leader_lock
SELECT pg_try_advisory_lock(hashtextextended(current_schema() || ':' || $1, 0)) AS held

-- name: leader_take
-- Take office: a number above every one before it in this epoch.
INSERT INTO leader AS l (role, epoch, number, holder) SELECT $1, e.epoch, 1, $2 FROM service_epoch AS e
ON CONFLICT (role) DO UPDATE SET
    number = CASE WHEN l.epoch = excluded.epoch THEN l.number + 1 ELSE 1 END, epoch = excluded.epoch, holder = excluded.holder, taken_at = now()
RETURNING role, epoch, number

-- name: leader_load
SELECT role, epoch, number FROM leader WHERE role = $1

-- name: leader_fence
-- Held until commit: the next leader waits for this write, or this write finds the next leader.
SELECT 1 AS one FROM leader WHERE role = $1 AND epoch = $2 AND number = $3 FOR SHARE

-- name: chain_waiting
-- Asked before the fence, whose row lock alone makes a commit that is written and synced.
SELECT EXISTS (SELECT FROM audit_unchained) AS waiting

-- name: chain_take
-- Rows that are committed and in no link, whatever their id: who commits late is found by the next call.
DELETE FROM audit_unchained WHERE audit IN (SELECT audit FROM audit_unchained ORDER BY audit LIMIT $1) RETURNING audit

-- name: chain_rows
SELECT id, at, actor, action, target, reason, result, trace_id FROM audit WHERE id = any($1::bigint[]) ORDER BY id

-- name: chain_add
INSERT INTO audit_chain (epoch, number, audit, digest, row) VALUES ($1, $2, $3, $4, $5)

-- name: chain_head
SELECT epoch, number, digest FROM audit_chain ORDER BY epoch DESC, number DESC LIMIT 1

-- name: chain_page
-- Links after (epoch, number), each with its row as that stands now.
SELECT c.epoch, c.number, c.audit, c.digest, c.row, a.id, a.at, a.actor, a.action, a.target, a.reason, a.result, a.trace_id
FROM audit_chain AS c LEFT JOIN audit AS a ON a.id = c.audit
WHERE (c.epoch, c.number) > ($1, $2) ORDER BY c.epoch, c.number LIMIT $3

-- name: chain_missing
-- Rows in no link. An anti-join over the whole audit: for a check, not for a beat.
SELECT a.id, a.at, a.actor, a.action, a.target, a.reason, a.result, a.trace_id, w.audit IS NOT NULL AS waiting
FROM audit AS a LEFT JOIN audit_chain AS c ON c.audit = a.id LEFT JOIN audit_unchained AS w ON w.audit = a.id
WHERE c.audit IS NULL ORDER BY a.id LIMIT $1
