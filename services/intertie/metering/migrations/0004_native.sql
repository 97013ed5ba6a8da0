-- What sites' own accounting says, day by day, exactly as they sealed it. A day that is read again is a new reading; the newest whole one counts.
CREATE TABLE native_day (
    site        text NOT NULL,
    cluster     text NOT NULL,
    day         date NOT NULL,
    read_at     timestamptz NOT NULL,
    part        integer NOT NULL CHECK (part >= 1),
    payload     text NOT NULL,
    signer      text NOT NULL,
    signature   text NOT NULL,
    received_at timestamptz NOT NULL,
    PRIMARY KEY (site, cluster, day, read_at, part)
);
CREATE INDEX attempt_of_site ON attempt (site, attempt);
