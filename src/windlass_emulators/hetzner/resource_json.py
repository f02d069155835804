"""Resources as the API renders them."""

from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any

from windlass_emulators.hetzner.catalog import CURRENCY, VAT_PERCENT, CatalogPrice, Image, Location, Rate, ServerType
from windlass_emulators.hetzner.project import (
    Action,
    Firewall,
    Network,
    PrimaryIp,
    Project,
    Server,
    SshKey,
)
from windlass_emulators.http import Json


def moment(value: datetime | None) -> str | None:
    return None if value is None else value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@lru_cache(maxsize=1024)
def price(value: CatalogPrice) -> Json:
    return {"net": f"{value.net:.10f}", "gross": f"{value.gross:.16f}"}


# -------------------------------------------------------------------------------------------------------- catalog


def location(value: Location) -> Json:
    return {
        "id": value.id,
        "name": value.name,
        "description": value.description,
        "country": value.country,
        "city": value.city,
        "latitude": value.latitude,
        "longitude": value.longitude,
        "network_zone": value.network_zone,
    }


def is_retired(project: Project, value: ServerType) -> bool:
    return value.unavailable_after is not None and value.unavailable_after <= project.now


def is_available(project: Project, value: ServerType, place: Location) -> bool:
    shortage = project.faults.shortage(value.name, place.name)
    return not is_retired(project, value) and (shortage is None or not shortage.is_announced)


def rates(project: Project, by_place: dict[str, Rate]) -> list[Json]:
    places = [(place, by_place[place.name]) for place in project.catalog.locations if place.name in by_place]
    return [
        {
            "location": place.name,
            "price_hourly": price(rate.hourly),
            "price_monthly": price(rate.monthly),
            "included_traffic": place.included_traffic_bytes,
            "price_per_tb_traffic": price(place.price_per_tb_traffic),
        }
        for place, rate in places
    ]


def server_type(project: Project, value: ServerType) -> Json:
    deprecation = None
    if value.announced_at is not None:
        deprecation = {"announced": moment(value.announced_at), "unavailable_after": moment(value.unavailable_after)}
    places = [place for place in project.catalog.locations if place.name in value.rates]
    return {
        "id": value.id,
        "name": value.name,
        "description": value.name.upper(),
        "category": value.category,
        "cores": value.cores,
        "memory": value.memory_gb,
        "disk": value.disk_gb,
        "deprecated": deprecation is not None,
        "deprecation": deprecation,
        "prices": rates(project, dict(value.rates)),
        "storage_type": "local",
        "cpu_type": value.cpu_type,
        "architecture": value.architecture,
        "locations": [
            {
                "id": place.id,
                "name": place.name,
                "deprecation": deprecation,
                "available": is_available(project, value, place),
                "recommended": is_available(project, value, place) and place.network_zone == "eu-central",
            }
            for place in places
        ],
    }


def image(value: Image) -> Json:
    return {
        "id": value.id,
        "type": "system",
        "status": "available",
        "name": value.name,
        "description": value.description,
        "image_size": None,
        "disk_size": value.disk_size_gb,
        "created": moment(value.created),
        "created_from": None,
        "bound_to": None,
        "os_flavor": value.os_flavor,
        "os_version": value.os_version,
        "rapid_deploy": True,
        "protection": {"delete": False},
        "deprecated": None,
        "deleted": None,
        "labels": {},
        "architecture": value.architecture,
    }


def pricing(project: Project) -> Json:
    catalog = project.catalog
    nothing = price(CatalogPrice(Decimal(0)))
    ip_rates = {"ipv4": catalog.primary_ipv4, "ipv6": catalog.primary_ipv6}
    return {
        "currency": CURRENCY,
        "vat_rate": f"{VAT_PERCENT:.10f}",
        "primary_ips": [
            {
                "type": type_,
                "prices": [
                    {
                        "location": place.name,
                        "price_hourly": price(rate.hourly),
                        "price_monthly": price(rate.monthly),
                    }
                    for place in catalog.locations
                ],
            }
            for type_, rate in ip_rates.items()
        ],
        "floating_ips": [],
        "image": {"price_per_gb_month": nothing},
        "volume": {"price_per_gb_month": nothing},
        "server_backup": {"percentage": "20.0000000000"},
        "server_types": [
            {"id": each.id, "name": each.name, "prices": rates(project, dict(each.rates))}
            for each in catalog.server_types
        ],
        "load_balancer_types": [],
        "floating_ip": {"price_monthly": nothing},
    }


# ------------------------------------------------------------------------------------------------------ resources


def action(project: Project, value: Action) -> Json:
    is_running = value.is_running(project.now)
    has_failed = value.error is not None and not is_running
    return {
        "id": value.id,
        "command": value.command,
        "status": "running" if is_running else "error" if has_failed else "success",
        "started": moment(value.started),
        "finished": None if is_running else moment(value.finishes),
        "progress": value.progress(project.now),
        "resources": [{"id": id_, "type": kind} for kind, id_ in value.resources],
        "error": {"code": value.error, "message": "Action failed"} if has_failed else None,
    }


def server(project: Project, value: Server, as_of: datetime | None = None) -> Json:
    """`as_of`: the time that a list with an injected lag shows."""
    kind = value.server_type
    return {
        "id": value.id,
        "name": value.name,
        "status": value.status if as_of is None else value.status_at(as_of),
        "created": moment(value.created),
        "public_net": _public_net(project, value),
        "private_net": [
            {"network": net.network_id, "ip": net.ip, "alias_ips": [], "mac_address": net.mac_address}
            for net in value.private_nets
        ],
        "server_type": _once(project, "server_type", kind.id, lambda: server_type(project, kind)),
        "location": location(value.location),
        "image": image(value.image),
        "iso": None,
        "rescue_enabled": False,
        "locked": value.is_locked(project.now),
        "backup_window": None,
        "outgoing_traffic": 0,
        "ingoing_traffic": 0,
        "included_traffic": value.location.included_traffic_bytes,
        "protection": {"delete": False, "rebuild": False},
        "labels": value.labels,
        "volumes": [],
        "load_balancers": [],
        "primary_disk_size": value.server_type.disk_gb,
        "placement_group": None,
    }


def _once(project: Project, what: str, id_: int, make: Callable[[], Json]) -> Json:
    """Rendered for the first server of a response and reused for the others."""
    if (what, id_) not in project.rendered:
        project.rendered[what, id_] = make()
    return project.rendered[what, id_]


def _public_net(project: Project, value: Server) -> Json:
    ips: dict[str, Any] = {"ipv4": None, "ipv6": None}
    for each in project.primary_ips_of(value):
        shown: Json = {"id": each.id, "ip": each.ip, "blocked": False}
        ips[each.type] = {**shown, "dns_ptr": _reverse_name(each) if each.type == "ipv4" else []}
    firewalls = [each for each in project.firewalls.values() if value.id in each.server_ids]
    return {
        **ips,
        "floating_ips": [],
        "firewalls": [{"id": each.id, "status": "applied"} for each in firewalls],
    }


def _reverse_name(value: PrimaryIp) -> str:
    return f"static.{'.'.join(reversed(value.ip.split('.')))}.clients.your-server.de"


def primary_ip(value: PrimaryIp) -> Json:
    return {
        "id": value.id,
        "name": value.name,
        "labels": value.labels,
        "created": moment(value.created),
        "blocked": False,
        "location": location(value.location),
        "ip": value.ip,
        "dns_ptr": [{"ip": value.ip, "dns_ptr": _reverse_name(value)}] if value.type == "ipv4" else [],
        "protection": {"delete": False},
        "type": value.type,
        "auto_delete": value.is_auto_deleted,
        "assignee_type": "server",
        "assignee_id": value.server_id,
    }


def network(project: Project, value: Network) -> Json:
    attached = [
        each.id for each in project.servers.values() if any(net.network_id == value.id for net in each.private_nets)
    ]
    return {
        "id": value.id,
        "name": value.name,
        "ip_range": value.ip_range,
        "subnets": value.subnets,
        "routes": [],
        "servers": attached,
        "load_balancers": [],
        "protection": {"delete": False},
        "labels": value.labels,
        "created": moment(value.created),
        "expose_routes_to_vswitch": False,
    }


def firewall(value: Firewall) -> Json:
    return {
        "id": value.id,
        "name": value.name,
        "labels": value.labels,
        "created": moment(value.created),
        "rules": value.rules,
        "applied_to": [{"type": "server", "server": {"id": id_}} for id_ in value.server_ids],
    }


def ssh_key(value: SshKey) -> Json:
    return {
        "id": value.id,
        "name": value.name,
        "fingerprint": value.fingerprint,
        "public_key": value.public_key,
        "labels": value.labels,
        "created": moment(value.created),
    }
