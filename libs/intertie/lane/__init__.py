"""The shells of a lane: `keeper` (bus and lane tables, at the hub) and `site` (bus and journal, at the agent). What a sync means is in
`intertie.link`; what an entry means is the service's business alone.
"""
