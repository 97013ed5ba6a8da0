-- The chain over the audit rows. A row is written in its effect's transaction, unchained; one fenced chainer per service numbers what is
-- committed and chains it, so no operation waits for another's, and a row that commits late is numbered late, never skipped.

-- Rows that wait for the chainer. Filled by the insert itself, so that finding them costs nothing however long the audit is.
CREATE TABLE audit_unchained (audit bigint PRIMARY KEY);
CREATE FUNCTION audit_waits_for_its_link() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO audit_unchained (audit) VALUES (NEW.id);
    RETURN NULL;
END $$;
CREATE TRIGGER audit_unchained AFTER INSERT ON audit FOR EACH ROW EXECUTE FUNCTION audit_waits_for_its_link();
-- What was written before there was a chain is chained at the chainer's first run.
INSERT INTO audit_unchained SELECT id FROM audit;

-- Numbers are gapless per epoch; the first of an epoch goes on from the last digest of the one before.
CREATE TABLE audit_chain (
    epoch  bigint NOT NULL CHECK (epoch >= 1),
    number bigint NOT NULL CHECK (number >= 1),
    audit  bigint NOT NULL UNIQUE,
    -- SHA-256 of the digest before, the number and the bytes below
    digest bytea NOT NULL CHECK (length(digest) = 32),
    -- the exact bytes that were hashed: never made again from the row
    row    bytea NOT NULL,
    PRIMARY KEY (epoch, number)
);
CREATE FUNCTION audit_chain_is_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'links of the audit chain are never changed' USING ERRCODE = 'restrict_violation', CONSTRAINT = 'audit_chain_append_only';
END $$;
CREATE TRIGGER audit_chain_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_chain EXECUTE FUNCTION audit_chain_is_append_only();
