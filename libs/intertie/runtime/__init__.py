"""A process's life: `main` (settings' errors to one sentence, logs, traces, the loop), `serve` (named tasks until one fails or SIGTERM),
`reach` (wait for a dependency at start), `ready` (the mark that others wait for), `Beat` (work that comes round), `HubSettings`.
"""

from intertie.runtime.beat import Beat
from intertie.runtime.process import main, reach, ready, serve
from intertie.runtime.settings import HubSettings, hub_settings

__all__ = ["Beat", "HubSettings", "hub_settings", "main", "reach", "ready", "serve"]
