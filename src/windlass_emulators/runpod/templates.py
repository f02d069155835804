"""/templates and /registries: resources that a fleet's configuration names.

Both can be created. A registry can be read, by id. Changing and deleting them is not emulated.
"""

from typing import Literal

from pydantic import Field

from windlass_emulators.http import ApiCall, Json, Response, json_response
from windlass_emulators.runpod import resource_json
from windlass_emulators.runpod.account import (
    EmulatedRunpodAccount,
    EmulatorConfig,
    NetworkMount,
    PersistentMount,
    Template,
)
from windlass_emulators.runpod.errors import RunpodApiError, not_found, unsupported
from windlass_emulators.runpod.validation import CudaVersion, NonEmptyText, RunpodBody, parse_runpod_body

DEFAULT_DISK_GB = 50


class PersistentMountBody(RunpodBody):
    size: int = Field(ge=10)
    path: str


class NetworkMountBody(RunpodBody):
    volumeId: str  # noqa: N815 - the published name
    path: str


class MountsBody(RunpodBody):
    persistent: PersistentMountBody | None = None
    network: list[NetworkMountBody] = Field(default=[], max_length=1)

    def read(self) -> PersistentMount | NetworkMount | None:
        """Raises RunpodApiError."""
        if self.persistent is not None and self.network:
            raise RunpodApiError(400, "mounts.persistent and mounts.network are mutually exclusive")
        if self.persistent is not None:
            return PersistentMount(self.persistent.size, self.persistent.path)
        return NetworkMount(self.network[0].volumeId, self.network[0].path) if self.network else None


class ContainerBody(RunpodBody):
    """The fields of a container that pods and templates share."""

    name: NonEmptyText
    args: str = ""
    disk: int = Field(default=DEFAULT_DISK_GB, ge=1)
    env: dict[str, str] = Field(default={})
    ports: list[str] = Field(default=[])
    registry: str | None = None
    image: str
    mounts: MountsBody = MountsBody()
    startSsh: bool = True  # noqa: N815 - the published name
    startJupyter: bool = True  # noqa: N815 - the published name

    def config_fields(self) -> Json:
        """The fields of EmulatorConfig that the client sent."""
        names = {"image": "image", "args": "args", "disk": "disk_gb", "env": "env", "ports": "ports"}
        fields = {own: getattr(self, name) for name, own in names.items() if name in self.model_fields_set}
        return {**fields, **({"registry": self.registry} if self.registry else {})}


class TemplateOrder(ContainerBody):
    serverless: bool = False
    public: bool = False
    category: Literal["CPU", "NVIDIA", "AMD"] = "NVIDIA"
    allowedCudaVersions: list[CudaVersion] = Field(default=[])  # noqa: N815 - the published name


def make_config(account: EmulatedRunpodAccount, fields: Json) -> EmulatorConfig:
    """Raises RunpodApiError for rules that are not part of the schema."""
    config = EmulatorConfig(
        **{"image": "", "args": "", "disk_gb": DEFAULT_DISK_GB, "env": {}, "ports": [], "registry": None, **fields}
    )
    for port in config.ports:
        number, _, kind = port.partition("/")
        if not number.isdecimal() or not 1 <= int(number) <= 65535 or kind not in ("tcp", "http"):
            raise RunpodApiError(400, f"port '{port}' must be formatted as port/protocol, with tcp or http")
    if len(set(config.ports)) < len(config.ports):
        raise RunpodApiError(400, "ports must not repeat")
    if config.registry is not None and config.registry not in account.registries:
        raise RunpodApiError(400, "registry not found")
    return config


def create_template(account: EmulatedRunpodAccount, call: ApiCall) -> Response:
    order = parse_runpod_body(TemplateOrder, call.body)
    if order.serverless or order.public:
        raise unsupported("serverless and public templates")
    mount = order.mounts.read()
    if isinstance(mount, NetworkMount):
        raise unsupported("network mounts in templates")
    template = Template(
        account.new_id(),
        order.name,
        make_config(account, order.config_fields()),
        mount,
        order.category,
        order.startSsh,
        order.startJupyter,
        list(order.allowedCudaVersions),
    )
    account.templates[template.id] = template
    return json_response(201, resource_json.template(template))


# -------------------------------------------------------------------------------------------------------- registries


class RegistryOrder(RunpodBody):
    name: NonEmptyText
    username: NonEmptyText
    password: NonEmptyText


def create_registry(account: EmulatedRunpodAccount, call: ApiCall) -> Response:
    order = parse_runpod_body(RegistryOrder, call.body)
    id_ = account.new_id()
    account.registries[id_] = order.name
    return json_response(201, {"id": id_, "name": order.name})


def get_registry(account: EmulatedRunpodAccount, call: ApiCall) -> Response:
    if call.params["id"] not in account.registries:
        raise not_found("registry")
    return json_response(200, {"id": call.params["id"], "name": account.registries[call.params["id"]]})
