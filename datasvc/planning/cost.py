"""What the traffic of a forecast costs: requests to the origin, and bytes that leave it or travel between nodes.

Prices are read from a file of the user, see `Prices`. They differ between providers, regions and contracts, so none
is built in.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from datasvc.cache.sources.origin_source import PART_BYTES, STREAMED_PARTS, RangeRequests
from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.planning.cache import EpochForecast, Forecast
from datasvc.printable import count_text

_GB: Final = 1e9
_MILLION: Final = 1e6
# Requests that a process has in progress at once by default. A shard that has all of them has the shortest requests.
_NUM_CONCURRENT: Final = 16
# Tables of the file, each with its required prices.
_TABLES: Final[Mapping[str, tuple[str, ...]]] = {
    "origin": ("requests_per_million", "egress_per_gb"),
    "peers": ("egress_per_gb",),
}
_FORMAT: Final = (
    'currency = "EUR", a table [origin] with requests_per_million and egress_per_gb, and optionally a table [peers] '
    "with egress_per_gb"
)


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices of traffic, in `currency`.

    Attributes:
        currency: any text, such as "EUR"; only printed.
        requests_per_million: price of a million read requests (GET) to the origin.
        egress_per_gb: price of 10^9 bytes that leave the origin.
        peers_per_gb: price of 10^9 bytes from one node to another.
    """

    currency: str
    requests_per_million: float
    egress_per_gb: float
    peers_per_gb: float = 0.0

    @classmethod
    def read(cls, path: Path) -> Prices:
        """Return the prices of a TOML file, whose format docs/how-to/cluster.md describes.

        Raises:
            ConfigError: the file cannot be read, is not valid TOML, lacks a price, or has an unknown key.
        """
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:  # invalid TOML, or invalid UTF-8
            raise ConfigError(f"{path} is not a valid TOML file: {error}") from error
        _check_keys(path, "it ", content, ("currency", *_TABLES))
        for table in ("origin", *content.keys() & {"peers"}):
            if not isinstance(content.get(table), dict):
                raise ConfigError(f"{path} has no table [{table}]; expected {_FORMAT}")
        currency = content.get("currency")
        if not isinstance(currency, str) or not currency:
            raise ConfigError(f"{path} has no currency; expected {_FORMAT}")
        prices = {table: _read_table(path, table, content[table]) for table in _TABLES if table in content}
        return cls(
            currency=currency,
            requests_per_million=prices["origin"]["requests_per_million"],
            egress_per_gb=prices["origin"]["egress_per_gb"],
            peers_per_gb=prices.get("peers", {}).get("egress_per_gb", 0.0),
        )


@dataclass(frozen=True)
class EpochCost:
    """Cost of the traffic of one epoch, or of several, over all nodes; money in the currency of the prices.

    Attributes:
        num_requests: read requests to the origin; an upper estimate, see `count_requests`.
        requests: price of these requests.
        egress: price of the bytes from the origin.
        peers: price of the bytes between nodes.
        total: sum of the three.
    """

    num_requests: int
    requests: float
    egress: float
    peers: float
    total: float


@dataclass(frozen=True)
class CostForecast:
    """Cost of a run.

    Attributes:
        currency: currency of all prices.
        first_epoch: cost of the epoch with empty caches.
        later_epochs: mean cost of an epoch after the first ones.
        epochs: number of epochs of the run; None: unknown.
        run: cost of these epochs together; None without `epochs`.
    """

    currency: str
    first_epoch: EpochCost
    later_epochs: EpochCost
    epochs: int | None
    run: EpochCost | None

    def by_period(self) -> dict[str, EpochCost]:
        """Return the costs of the first epoch, of each later one, and of the run if its epochs are known, by name."""
        costs = {"the first epoch": self.first_epoch, "each later epoch": self.later_epochs}
        if self.epochs is not None and self.run is not None:
            costs[count_text(self.epochs, "epoch")] = self.run
        return costs


def forecast_cost(
    forecast: Forecast, bytes_per_shard: Integers, prices: Prices, *, epochs: int | None = None
) -> CostForecast:
    """Return what the traffic of a forecast costs.

    Args:
        forecast: the forecast.
        bytes_per_shard: `int64[num_shards]`, those of the forecast.
        prices: the prices.
        epochs: epochs of the run, at least 1; None: unknown.

    Raises:
        ConfigError: `epochs` is below 1.
    """
    if epochs is not None and epochs < 1:
        raise ConfigError(f"epochs is {epochs}; expected 1 or more")
    # Shards are fetched whole, so the requests of an epoch are in proportion to its bytes.
    requests_per_byte = count_requests(bytes_per_shard) / max(forecast.data_bytes, 1)
    first, later = (
        _cost(round(epoch.origin_bytes * requests_per_byte), epoch.origin_bytes, epoch.peer_bytes, prices)
        for epoch in (forecast.first_epoch, forecast.later_epochs)
    )
    run = None
    if epochs is not None:
        run = _cost(
            first.num_requests + (epochs - 1) * later.num_requests,
            _total_bytes(forecast, "origin_bytes", epochs),
            _total_bytes(forecast, "peer_bytes", epochs),
            prices,
        )
    return CostForecast(prices.currency, first, later, epochs, run)


def format_money(amount: float) -> str:
    """Return an amount as text, such as "1,234.50", without its currency."""
    # Of the little that a small data set costs, two decimals would show nothing.
    return f"{amount:,.2f}" if amount >= 1 else f"{amount:.3g}"


def count_requests(bytes_per_shard: Integers) -> int:
    """Return the number of ranged requests that read every shard once, if no two are fetched at the same time.

    Shards that are fetched at the same time share the requests in progress, which are then longer and fewer.
    """
    counts = Counter((-(-bytes_per_shard // PART_BYTES)).tolist())
    return sum(num_shards * _requests_of_shard(num_parts) for num_parts, num_shards in counts.items())


def _requests_of_shard(num_parts: int) -> int:
    ranges = RangeRequests(0, num_parts * PART_BYTES, STREAMED_PARTS)
    return sum(1 for _ in iter(lambda: ranges.take(_NUM_CONCURRENT), None))


def _total_bytes(forecast: Forecast, field: str, epochs: int) -> int:
    def of(epoch: EpochForecast) -> int:
        return int(getattr(epoch, field))

    return of(forecast.first_epoch) + (epochs - 1) * of(forecast.later_epochs)


def _cost(num_requests: int, origin_bytes: int, peer_bytes: int, prices: Prices) -> EpochCost:
    requests = num_requests / _MILLION * prices.requests_per_million
    egress = origin_bytes / _GB * prices.egress_per_gb
    peers = peer_bytes / _GB * prices.peers_per_gb
    return EpochCost(num_requests, requests, egress, peers, requests + egress + peers)


def _read_table(path: Path, table: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Return the prices of a table. Raises ConfigError: a price is missing, unknown or not a number from 0."""
    _check_keys(path, f"[{table}] ", values, _TABLES[table])
    prices = {}
    for name in _TABLES[table]:
        value = values.get(name)
        # `bool` is a subclass of `int`.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            found = "is missing" if value is None else f"is {value!r}"
            raise ConfigError(f"{path}: {name} in [{table}] {found}; expected a price, 0 or more")
        prices[name] = float(value)
    return prices


def _check_keys(path: Path, table: str, values: Mapping[str, Any], expected: tuple[str, ...]) -> None:
    if unknown := sorted(values.keys() - set(expected)):
        raise ConfigError(f"{path}: {table}has an unknown key {unknown[0]!r}; expected {', '.join(expected)}")
