"""The site link: a lane's two sides as machines without I/O (`site`, `keeper`), and the port of the journal (`journal`)."""
