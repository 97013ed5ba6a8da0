"""The gateway: the one door for people and outside programs. HTTP in, requests on the bus out; it keeps bytes (packs, results) and no facts."""
