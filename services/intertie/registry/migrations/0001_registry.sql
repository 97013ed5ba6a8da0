-- Sites and pools. A record is the contract's own JSON; columns that the database judges or finds by are generated from it.

CREATE TABLE site (
    site    text PRIMARY KEY,
    record  jsonb NOT NULL,
    version bigint NOT NULL GENERATED ALWAYS AS ((record ->> 'version')::bigint) STORED,
    -- cards that stood in two pools when the site last reported: a fault is told when this changes, not with each report
    doubled text[] NOT NULL DEFAULT '{}',
    CONSTRAINT site_name CHECK (record ->> 'site' = site),
    CONSTRAINT site_version CHECK (version >= 1)
);

CREATE TABLE pool (
    site         text NOT NULL REFERENCES site,
    pool         text NOT NULL,
    record       jsonb NOT NULL,
    version      bigint NOT NULL GENERATED ALWAYS AS ((record ->> 'version')::bigint) STORED,
    -- what was told last; a lower version than the record's is told with the leader's next beat
    told_version bigint NOT NULL DEFAULT 0,
    told_at      timestamptz,
    PRIMARY KEY (site, pool),
    CONSTRAINT pool_name CHECK (record ->> 'site' = site AND record ->> 'pool' = pool),
    CONSTRAINT pool_version CHECK (version >= 1 AND told_version <= version),
    CONSTRAINT pool_phase CHECK (record ->> 'phase' IN ('candidate', 'pilot', 'parallel', 'production', 'suspended', 'closed'))
);
CREATE INDEX pool_untold ON pool (site, pool) WHERE told_version < (record ->> 'version')::bigint;

-- Every revision of every profile: what a pool was declared to be at the time of a job.
CREATE TABLE profile_revision (
    site         text NOT NULL,
    pool         text NOT NULL,
    revision     bigint NOT NULL CHECK (revision >= 1),
    profile      jsonb NOT NULL,
    declared_by  text NOT NULL,
    -- the site's clock, for people
    declared_at  timestamptz NOT NULL,
    -- the hub's clock: from then on it was placed by
    effective_at timestamptz NOT NULL,
    PRIMARY KEY (site, pool, revision),
    FOREIGN KEY (site, pool) REFERENCES pool DEFERRABLE INITIALLY DEFERRED
);
