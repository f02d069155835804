"""What the minimum of a fleet costs per day, logged when `windlass up` starts.

A minimum of rented machines costs money before the first task. The price is the one that the vendor publishes for the
fleet's first choice; where it cannot be read, the log line says so instead.
"""

import structlog

from windlass.model.config import Config
from windlass.model.errors import WindlassError
from windlass.model.fleet import FleetConfig
from windlass.model.machine import Quote
from windlass.model.money import with_currency
from windlass.providers.hetzner import catalog as hetzner_catalog
from windlass.providers.runpod import catalog as runpod_catalog
from windlass.wiring.providers import hetzner_account, runpod_account
from windlass.wiring.reachability import remote_fleets

HOURS_PER_DAY = 24
PRICE_WAIT_S = 30.0
log = structlog.get_logger("windlass.up")


async def log_minimum_costs(config: Config) -> None:
    for name, fleet in remote_fleets(config).items():
        if fleet.min_workers == 0:
            continue
        quote = await quote_price(fleet, config)
        log.warning(
            "keep minimum workers",
            fleet=name,
            min_workers=fleet.min_workers,
            cost_per_day=cost_per_day(fleet, quote),
            machine=quote.choice if quote is not None else None,
            hint="set min_workers = 0 to rent machines only while there are tasks",
        )


def cost_per_day(fleet: FleetConfig, quote: Quote | None) -> str:
    if quote is None:
        return "unknown"
    return with_currency(fleet.min_workers * quote.price_micros_per_hour * HOURS_PER_DAY, quote.currency)


async def quote_price(fleet: FleetConfig, config: Config) -> Quote | None:
    """The published price of one machine of this fleet; None if it cannot be read."""
    try:
        if fleet.provider == "hetzner":
            servers = hetzner_account(config, fleet.hetzner.call_timeout_s)
            return hetzner_catalog.quote(fleet.hetzner, await servers.prices(fleet.hetzner.prices, PRICE_WAIT_S))
        if fleet.provider == "runpod":
            pods = runpod_account(config, fleet.runpod.call_timeout_s)
            clouds = {choice.cloud for choice in fleet.runpod.ordered}
            return runpod_catalog.quote(fleet.runpod, await pods.offers(clouds, fleet.runpod.gpu_count))
    except WindlassError:
        return None
    return None
