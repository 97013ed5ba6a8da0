"""A site whose queue is Slurm (21.08 to 25.11): submitted to through its queue, never by node, and read in its own words.

`core/` reads and decides without touching anything; `transport` runs the commands (here, as a mapped account, on a login node), `rest` speaks
to slurmrestd; `cluster` is the port that the rest of the agent sees.
"""
