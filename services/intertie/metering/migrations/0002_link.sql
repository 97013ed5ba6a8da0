-- What a broken link leaves: a site's word on a period that is over, journals opened anew, evidence that nobody has, what a person decided, and
-- adjustments of what was closed before its evidence came.

-- A later word on an attempt that was closed is a new entry that cites the one before it.
ALTER TABLE entry DROP CONSTRAINT entry_kind_check;
ALTER TABLE entry ADD CONSTRAINT entry_kind_check CHECK (kind IN ('hold', 'post', 'release', 'adjust'));
ALTER TABLE entry ADD COLUMN cites bigint REFERENCES entry (id);
ALTER TABLE entry ADD CONSTRAINT entry_adjusts CHECK ((kind = 'adjust') = (cites IS NOT NULL));

-- What a site said of its periods, each time it said something else. Counts are of segments that end in (starts_at, ends_at].
CREATE TABLE period_told (
    number            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    site              text NOT NULL,
    period            text NOT NULL,
    starts_at         timestamptz NOT NULL,
    ends_at           timestamptz NOT NULL CHECK (ends_at > starts_at),
    attempts          bigint NOT NULL CHECK (attempts >= 0),
    segments          bigint NOT NULL CHECK (segments >= 0),
    quantity_milli_us numeric NOT NULL CHECK (quantity_milli_us >= 0),
    digest            text NOT NULL,
    payload           text NOT NULL,
    signer            text NOT NULL,
    signature         text NOT NULL,
    received_at       timestamptz NOT NULL,
    proven            boolean NOT NULL,
    UNIQUE (site, digest)
);
CREATE INDEX period_of_site ON period_told (site, period);
CREATE TRIGGER period_append_only
    BEFORE DELETE OR TRUNCATE OR UPDATE OF site, period, starts_at, ends_at, attempts, segments, quantity_milli_us, digest, payload, signer, signature,
        received_at ON period_told
    EXECUTE FUNCTION metering_append_only();
-- to count a site's segments of a period
CREATE INDEX segment_of_site ON segment (site, ends_at);

-- Journals that took the place of others: their numbers do not compare with those of the ones before.
CREATE TABLE journal_opened (
    site      text NOT NULL,
    journal   text NOT NULL,
    previous  text,
    why       text NOT NULL,
    said_at   timestamptz NOT NULL,
    PRIMARY KEY (site, journal)
);
CREATE TRIGGER journal_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON journal_opened EXECUTE FUNCTION metering_append_only();

-- Entries that exist nowhere any more.
CREATE TABLE lost_range (
    site      text NOT NULL,
    journal   text NOT NULL,
    first     bigint NOT NULL CHECK (first >= 1),
    last      bigint NOT NULL CHECK (last >= first),
    payload   text NOT NULL,
    signer    text NOT NULL,
    signature text NOT NULL,
    said_at   timestamptz NOT NULL,
    proven    boolean NOT NULL,
    PRIMARY KEY (site, journal, first, last)
);
CREATE TRIGGER lost_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON lost_range EXECUTE FUNCTION metering_append_only();

-- A named person's word that a segment counts although this rule holds it back. The newest of a segment is in force.
CREATE TABLE suspense_decision (
    id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    segment bigint NOT NULL REFERENCES segment (number),
    lifts   text NOT NULL CHECK (lifts IN ('conflict', 'impossible_times', 'over_wall')),
    who     text NOT NULL CHECK (who <> ''),
    why     text NOT NULL CHECK (why <> ''),
    at      timestamptz NOT NULL,
    UNIQUE (segment, lifts)
);
CREATE TRIGGER decision_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON suspense_decision EXECUTE FUNCTION metering_append_only();
