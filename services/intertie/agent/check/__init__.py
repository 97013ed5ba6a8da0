"""`intertie-agent check`: the owner's pre-flight. Every line is ok, warn or fail, with the command that mends it, and may be shown to anybody.

`report` has the lines and the registry that rooms of other kinds add to; `machine`, `reach`, `pools` and `slurm` look; `detect` writes down what
it can see as a profile, so that the owner answers how much, when and for whom; `texts` says it in two languages.
"""

from intertie.agent.check.report import Check, Level, Line, Place, Report, checks_of, run

__all__ = ["Check", "Level", "Line", "Place", "Report", "checks_of", "run"]
