"""nats-server and PostgreSQL from their wheels, and a whole hub of own processes on one machine. Not needed in production."""
