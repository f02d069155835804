"""Which endpoint answers which request."""

import re
from collections.abc import Callable

from windlass.emulate.runpod import billing, offers, pods, presets, volumes
from windlass.emulate.runpod.account import Account
from windlass.emulate.runpod.calls import Answer, Call
from windlass.emulate.runpod.errors import Problem, not_found, unsupported

Endpoint = Callable[[Account, Call], Answer]
BASE = "/v2"


def _empty(root: str) -> Endpoint:
    return lambda _account, _call: Answer(200, {root: []})


def _missing(what: str) -> Endpoint:
    def nowhere(_account: Account, _call: Call) -> Answer:
        raise not_found(what)

    return nowhere


def _refuse(what: str) -> Endpoint:
    def refuse(_account: Account, _call: Call) -> Answer:
        raise unsupported(what)

    return refuse


_ROUTES: dict[str, dict[str, Endpoint]] = {
    "/account/ssh-keys": {"GET": presets.get_ssh_keys, "PUT": presets.update_ssh_keys},
    "/pods": {"GET": pods.list_all, "POST": pods.create},
    "/pods/{id}": {"GET": pods.get, "PATCH": pods.update, "DELETE": pods.delete},
    "/pods/{id}/logs": {"GET": pods.logs},
    "/pods/{id}/action": {"POST": pods.act},
    "/network-volumes": {"GET": volumes.list_all, "POST": volumes.create},
    "/network-volumes/{id}": {"GET": volumes.get, "PATCH": volumes.update, "DELETE": volumes.delete},
    "/templates": {"GET": presets.list_templates, "POST": presets.create_template},
    "/templates/{id}": {
        "GET": presets.get_template, "PATCH": presets.update_template, "DELETE": presets.delete_template,
    },
    "/registries": {"GET": presets.list_registries, "POST": presets.create_registry},
    "/registries/delegations": {"GET": _empty("delegations"), "POST": _refuse("delegations")},
    "/registries/{id}": {"GET": presets.get_registry, "DELETE": presets.delete_registry},
    "/registries/delegations/{id}": {"DELETE": _missing("delegation")},
    "/catalog/gpus": {"GET": offers.list_gpus},
    "/catalog/gpus/{id}": {"GET": offers.get_gpu},
    "/catalog/cpus": {"GET": offers.list_cpus},
    "/catalog/cpus/{id}": {"GET": offers.get_cpu},
    "/catalog/datacenters": {"GET": offers.list_data_centers},
    "/catalog/datacenters/{id}": {"GET": offers.get_data_center},
    "/catalog/templates": {"GET": presets.list_public_templates},
    "/billing": {"GET": billing.everything},
    "/billing/pods": {"GET": billing.pods},
    "/billing/serverless": {"GET": billing.serverless},
    "/billing/endpoints": {"GET": billing.endpoints},
    "/billing/network-volumes": {"GET": billing.network_volumes},
    "/billing/clusters": {"GET": billing.clusters},
    "/clusters": {"GET": _empty("clusters"), "POST": _refuse("clusters")},
    "/clusters/{id}": {name: _missing("cluster") for name in ("GET", "PATCH", "DELETE")},
    "/clusters/{id}/pods": {"GET": _missing("cluster")},
    "/serverless": {"GET": _empty("endpoints"), "POST": _refuse("serverless endpoints")},
    "/serverless/{id}": {name: _missing("endpoint") for name in ("GET", "PATCH", "DELETE")},
    "/serverless/{id}/workers": {"GET": _missing("endpoint")},
    "/serverless/{id}/releases": {"GET": _missing("endpoint")},
    "/serverless/{id}/workers/{id}/logs": {"GET": _missing("endpoint")},
}  # fmt: skip

# Fixed words before placeholders, as they are listed: /registries/delegations is no registry.
_PATTERNS = [(re.compile(BASE + place.replace("{id}", "([^/]+)")), methods) for place, methods in _ROUTES.items()]


def route(method: str, path: str) -> tuple[Endpoint, str]:
    """Who answers, and what stands in place of {id}. Raises Problem."""
    for pattern, methods in _PATTERNS:
        if match := pattern.fullmatch(path):
            if method not in methods:
                raise Problem(405, headers={"Allow": ", ".join(methods)})
            return methods[method], match[1] if match.groups() else ""
    raise Problem(404)
