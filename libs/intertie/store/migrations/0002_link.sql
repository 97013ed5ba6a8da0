-- What a keeper keeps of a lane's two sides: where the journal lies, how often it changed its place, and in which named state the lane is.
ALTER TABLE lane_site
    ADD COLUMN place       text NOT NULL DEFAULT '',
    -- the last changes of place, by this hub's clock: three within ten minutes are two agents with one identity
    ADD COLUMN moves       timestamptz[] NOT NULL DEFAULT '{}',
    ADD COLUMN state       text NOT NULL DEFAULT 'ok',
    ADD COLUMN state_since timestamptz,
    -- the highest epoch that the site said it knows of this service: `hub restored` goes above it
    ADD COLUMN epoch_told  bigint NOT NULL DEFAULT 0,
    -- the link version that the site spoke last
    ADD COLUMN version     integer NOT NULL DEFAULT 1;
