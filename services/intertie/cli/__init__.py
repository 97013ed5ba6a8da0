"""The command line. It talks HTTP to the gateway for everything but `local`, `agent`, `hub` and `quickstart`; nothing heavy is imported at start."""
