"""A pool of machines as one site: the site's agent is the head, every further machine is a node that dials it.

`wire` is the line between them (TLS, framed messages) and the bus on top of it; the words on it are the lane protocol that a site speaks to its
hub, so a node is a site to its head: `node` and `service` run one. `store` is what the head has on its own disk before it answers, `head` what it
makes of a node's word, `adapter` what the site's desk sees of all that, `pool` wires it into the agent, `door` is the owner's way in.
"""
