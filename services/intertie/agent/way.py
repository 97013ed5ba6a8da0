"""The way from this site to its hub: the proxy that the owner named in `site.toml`, else what the environment says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from intertie.agent.config import Folder
from intertie.agent.core.place import LinkWay
from intertie.bus.proxy import STRAIGHT, Way, parse_proxy

__all__ = ["STRAIGHT", "Way", "http_options", "way_of"]


def way_of(folder: Folder) -> Way:
    """`Refused('link.proxy' | 'link.proxy_password' | 'agent.rules')`."""
    link = folder.rules().link
    return named(link, folder.rules_file) if link is not None and link.proxy else STRAIGHT


def named(link: LinkWay, source: Path) -> Way:
    file = Path(link.proxy_password_file) if link.proxy_password_file else None
    return Way(parse_proxy(link.proxy, where=f"proxy of [link] in {source}", password_file=file), tuple(link.direct))


def http_options(way: Way, url: str) -> dict[str, Any]:
    """What an aiohttp request to `url` is given so that it goes this way; the session's own `trust_env` stays off."""
    proxy = way.through(url)
    if proxy is None:
        return {}
    # Where there is no tunnel, aiohttp takes the proxy's login from this header and gives it the right name in the request itself.
    name = "Proxy-Authorization" if url.startswith("https:") else "Authorization"
    login = {name: proxy.authorization} if proxy.authorization else {}
    return {"proxy": proxy.url, "proxy_headers": login}
