-- name: system_ping
-- Proves that the server answers.
SELECT 1 AS one

-- name: epoch_load
SELECT epoch FROM service_epoch

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
