-- Drills: the record, the site's own signed account, and the evidence once it is judged.
CREATE TABLE drill (
    drill    text PRIMARY KEY,
    site     text NOT NULL REFERENCES site,
    record   jsonb NOT NULL,
    state    text NOT NULL GENERATED ALWAYS AS (record ->> 'state') STORED,
    asked_at timestamptz NOT NULL,
    report   jsonb,
    evidence jsonb,
    CONSTRAINT drill_name CHECK (record ->> 'drill' = drill AND record ->> 'site' = site),
    CONSTRAINT drill_state CHECK (record ->> 'state' IN ('planned', 'cut', 'back', 'judged', 'called_off')),
    CONSTRAINT drill_judged_with_evidence CHECK ((record ->> 'state' = 'judged') = (evidence IS NOT NULL))
);
-- one drill at a time, in the whole federation
CREATE UNIQUE INDEX one_open_drill ON drill ((true)) WHERE record ->> 'state' IN ('planned', 'cut', 'back');
CREATE INDEX drill_by_time ON drill (asked_at);

-- The owner's last word about drills of a site.
CREATE TABLE drill_consent (
    site    text PRIMARY KEY REFERENCES site,
    consent jsonb NOT NULL
);
