-- Heads of the services' audit chains, as they were told, each signed by this service's key. Nothing here is ever changed.
CREATE TABLE audit_anchor (
    service text NOT NULL,
    epoch   bigint NOT NULL CHECK (epoch >= 1),
    number  bigint NOT NULL CHECK (number >= 1),
    -- counts a service's anchors
    nth     bigint NOT NULL CHECK (nth >= 1),
    anchor  jsonb NOT NULL,
    PRIMARY KEY (service, epoch, number),
    UNIQUE (service, nth)
);
CREATE FUNCTION audit_anchor_is_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'anchors are never changed' USING ERRCODE = 'restrict_violation', CONSTRAINT = 'audit_anchor_append_only';
END $$;
CREATE TRIGGER audit_anchor_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_anchor EXECUTE FUNCTION audit_anchor_is_append_only();
