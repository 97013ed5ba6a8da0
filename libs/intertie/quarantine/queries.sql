-- name: quarantine_read
-- Oldest first; null for every site.
SELECT site, journal, seq, raw, error, at FROM quarantine
WHERE lane = $1 AND released_at IS NULL AND ($2::text IS NULL OR site = $2) ORDER BY id LIMIT $3

-- name: quarantine_count
SELECT count(*) AS total FROM quarantine WHERE lane = $1 AND released_at IS NULL AND ($2::text IS NULL OR site = $2)

-- name: quarantine_reopen
-- One entry, or with null all of the site: it stands open again as if it had just come.
WITH chosen AS (
    UPDATE quarantine AS q SET released_at = now()
    WHERE q.lane = $1 AND q.site = $2 AND q.released_at IS NULL AND ($3::text IS NULL OR (q.journal = $3 AND q.seq = $4::bigint))
        AND EXISTS (SELECT 1 FROM lane_entry AS e WHERE e.site = q.site AND e.lane = q.lane AND e.journal = q.journal AND e.seq = q.seq)
    RETURNING q.site, q.lane, q.journal, q.seq
)
UPDATE lane_entry AS e SET interpreted_at = NULL FROM chosen AS c
WHERE e.site = c.site AND e.lane = c.lane AND e.journal = c.journal AND e.seq = c.seq
