"""NATS accounts, seals, signed claims, tokens and rights: what may be believed, and who may do what. Keeps no state."""
