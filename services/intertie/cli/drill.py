"""`intertie drill …` (filled in by the drill)."""

from __future__ import annotations

import click


@click.group()
def drill() -> None:
    """Rehearse a cut of a site's link with its owner's consent, and sign what happened."""
