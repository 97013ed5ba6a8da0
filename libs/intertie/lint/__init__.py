"""What of a job script will not travel, told per site and line before anything is sent. Pure: a script and what sites told of themselves in,
findings out. `words` reads the shell's grammar, `rules` judges. The sentences for people are the caller's.
"""

from intertie.lint.rules import Finding, Kind, Severity, Verdict, lint

__all__ = ["Finding", "Kind", "Severity", "Verdict", "lint"]
