-- What was decided about a pool: its mode with the two answers, its moves of phase, its downtimes. Rows are added and never changed.
CREATE TABLE pool_decision (
    site   text NOT NULL,
    pool   text NOT NULL,
    number bigint NOT NULL CHECK (number >= 1),
    row    jsonb NOT NULL,
    at     timestamptz NOT NULL,
    PRIMARY KEY (site, pool, number),
    FOREIGN KEY (site, pool) REFERENCES pool DEFERRABLE INITIALLY DEFERRED,
    CONSTRAINT pool_decision_is_one CHECK (num_nonnulls(nullif(row -> 'decision', 'null'), nullif(row -> 'move', 'null'), nullif(row -> 'downtime', 'null')) = 1)
);
