"""What every hub process is told by its environment (the list is in the architecture page)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from intertie.errors import Refused
from intertie.settings import load


class HubSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`INTERTIE_<FIELD>`. A service with more settings inherits from this."""

    bus_url: list[str]
    """One or several, by comma."""
    bus_creds: Path | None = None
    database_url: str
    """Without a password."""
    database_password_file: Path | None = None
    key_file: Path
    """The service's own nkey seed: signs its claims and seals."""
    keys_file: Path
    """Public keys of all services, JSON."""
    data_dir: Path
    ready_file: Path | None = None
    beat_s: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Factor on every beat; tests make it small."""
    anchor_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """Seconds between anchors of the audit chain: a row younger than this could be removed unseen."""


def hub_settings(environ: Mapping[str, str]) -> HubSettings:
    """`Refused('settings.invalid')` with everything that is wrong."""
    settings = load(HubSettings, environ)
    if urlsplit(settings.database_url).password:
        raise Refused(
            "settings.invalid",
            "INTERTIE_DATABASE_URL holds a password, which every process list would show",
            next_step="put it into a file of mode 0600 and name that in INTERTIE_DATABASE_PASSWORD_FILE",
        )
    return settings
