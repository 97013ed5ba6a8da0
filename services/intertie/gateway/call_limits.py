"""How often a tenant may call an offering here: a bucket that fills by the minute. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

# Tenants × offerings remembered; one that is forgotten begins full again.
BUCKETS = 100_000


@dataclass(slots=True)
class _Bucket:
    left: float
    at_s: float


class Rates:
    """Buckets by key. Each holds a tenth of a minute's calls at once (five at least), and fills evenly."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[tuple[str, str], _Bucket] = OrderedDict()

    def take(self, tenant: str, offering: str, per_minute: int, now_s: float) -> float:
        """0 if the call may go; else the seconds until one may."""
        most = float(max(min(5, per_minute), per_minute // 10))
        key = (tenant, offering)
        bucket = self._buckets.setdefault(key, _Bucket(most, now_s))
        self._buckets.move_to_end(key)
        while len(self._buckets) > BUCKETS:
            self._buckets.popitem(last=False)
        bucket.left = min(most, bucket.left + max(0.0, now_s - bucket.at_s) * per_minute / 60)
        bucket.at_s = now_s
        if bucket.left >= 1:
            bucket.left -= 1
            return 0.0
        return (1 - bucket.left) * 60 / per_minute
