-- What was decided about a pool is added to and never changed: the database says so, too.
CREATE FUNCTION pool_decision_stays() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'what was decided about a pool is never changed' USING ERRCODE = 'restrict_violation', CONSTRAINT = 'pool_decision_append_only';
END $$;
CREATE TRIGGER pool_decision_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON pool_decision EXECUTE FUNCTION pool_decision_stays();
