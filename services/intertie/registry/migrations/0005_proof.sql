-- Probes of pools as their sites signed them: nothing of one is ever changed; the oldest of many go.
CREATE TABLE probe (
    site        text NOT NULL,
    pool        text NOT NULL,
    probe       text NOT NULL,
    report      jsonb NOT NULL,
    sealed      jsonb NOT NULL,
    -- the hub's clock
    received_at timestamptz NOT NULL,
    PRIMARY KEY (site, pool, probe),
    CONSTRAINT probe_names CHECK (report ->> 'site' = site AND report ->> 'pool' = pool AND report ->> 'probe' = probe),
    CONSTRAINT probe_outcome CHECK (report ->> 'outcome' IN ('passed', 'failed', 'unproven'))
);
CREATE INDEX probe_by_time ON probe (site, pool, received_at DESC);

-- What of a pool differs from its declaration, as it was told last.
CREATE TABLE drift (
    site  text NOT NULL,
    pool  text NOT NULL,
    drift jsonb NOT NULL,
    at    timestamptz NOT NULL,
    PRIMARY KEY (site, pool)
);
