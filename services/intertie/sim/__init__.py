"""The federation in one event loop on virtual time: real cores, services, lanes and agents, over stores, bus and machines in memory, with faults
drawn from a seed. `python -m intertie.sim run --seeds 1..200`.

`loop` and `clock` are time, `bus` and `disk` are what can fail, `hub` and `host` put the product's own parts on them, `world` lets a scenario
happen, `checks` says what must be true afterwards. This is the one room that may import other services; nobody imports it.
"""
