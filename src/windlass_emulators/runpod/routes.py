"""Which endpoint answers which request."""

import re
from collections.abc import Callable

from windlass_emulators.runpod import billing, offers, pods, templates, volumes
from windlass_emulators.runpod.account import EmulatedRunpodAccount
from windlass_emulators.runpod.calls import RunpodAnswer, RunpodCall
from windlass_emulators.runpod.errors import RunpodApiError, not_found, unsupported

Endpoint = Callable[[EmulatedRunpodAccount, RunpodCall], RunpodAnswer]
BASE = "/v2"


def _empty(root: str) -> Endpoint:
    return lambda _account, _call: RunpodAnswer(200, {root: []})


def _missing(what: str) -> Endpoint:
    def nowhere(_account: EmulatedRunpodAccount, _call: RunpodCall) -> RunpodAnswer:
        raise not_found(what)

    return nowhere


def _refuse(what: str) -> Endpoint:
    def refuse(_account: EmulatedRunpodAccount, _call: RunpodCall) -> RunpodAnswer:
        raise unsupported(what)

    return refuse


_ROUTES: dict[str, dict[str, Endpoint]] = {
    "/account/ssh-keys": {"GET": templates.get_ssh_keys, "PUT": templates.update_ssh_keys},
    "/pods": {"GET": pods.list_all, "POST": pods.create},
    "/pods/{id}": {"GET": pods.get, "PATCH": pods.update, "DELETE": pods.delete},
    "/pods/{id}/logs": {"GET": pods.logs},
    "/pods/{id}/action": {"POST": pods.act},
    "/network-volumes": {"GET": volumes.list_all, "POST": volumes.create},
    "/network-volumes/{id}": {"GET": volumes.get, "PATCH": volumes.update, "DELETE": volumes.delete},
    "/templates": {"GET": templates.list_templates, "POST": templates.create_template},
    "/templates/{id}": {
        "GET": templates.get_template, "PATCH": templates.update_template, "DELETE": templates.delete_template,
    },
    "/registries": {"GET": templates.list_registries, "POST": templates.create_registry},
    "/registries/delegations": {"GET": _empty("delegations"), "POST": _refuse("delegations")},
    "/registries/{id}": {"GET": templates.get_registry, "DELETE": templates.delete_registry},
    "/registries/delegations/{id}": {"DELETE": _missing("delegation")},
    "/catalog/gpus": {"GET": offers.list_gpus},
    "/catalog/gpus/{id}": {"GET": offers.get_gpu},
    "/catalog/cpus": {"GET": offers.list_cpus},
    "/catalog/cpus/{id}": {"GET": offers.get_cpu},
    "/catalog/datacenters": {"GET": offers.list_data_centers},
    "/catalog/datacenters/{id}": {"GET": offers.get_data_center},
    "/catalog/templates": {"GET": templates.list_public_templates},
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
                raise RunpodApiError(405, headers={"Allow": ", ".join(methods)})
            return methods[method], match[1] if match.groups() else ""
    raise RunpodApiError(404)
