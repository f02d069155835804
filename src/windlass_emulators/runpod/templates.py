"""/templates, /registries, /account/ssh-keys: what an account prepares once and its pods then use."""

import re

from windlass_emulators.http import Json
from windlass_emulators.runpod import render
from windlass_emulators.runpod.account import (
    EmulatedRunpodAccount,
    EmulatorConfig,
    NetworkMount,
    PersistentMount,
    Template,
)
from windlass_emulators.runpod.calls import RunpodAnswer, RunpodCall
from windlass_emulators.runpod.errors import RunpodApiError, not_found
from windlass_emulators.runpod.validation import CUDA_VERSION, Body

CATEGORIES = ("CPU", "NVIDIA", "AMD")
DEFAULT_DISK_GB = 50
MIN_PERSISTENT_GB = 10
_PUBLIC_KEY = re.compile(r"(ssh|ecdsa|sk)-[^\s]+ [^\s]+([ \t][^\n\r]*)?")

# What Runpod itself offers, by id.
OFFICIAL = {
    each.id: each
    for each in (
        Template(
            "runpod-torch-v280", "Runpod Pytorch 2.8.0",
            EmulatorConfig(
                "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404", "", 20, {}, ["8888/http", "22/tcp"], None
            ),
            PersistentMount(20, "/workspace"), False, True, "NVIDIA", True, True, [],
        ),
        Template(
            "runpod-ubuntu-2404", "Runpod Ubuntu 24.04",
            EmulatorConfig("runpod/base:1.0.2-ubuntu2404", "", 20, {}, ["22/tcp"], None),
            None, False, True, "CPU", True, False, [],
        ),
    )
}  # fmt: skip


def read_config(body: Body) -> Json:
    """The fields of a container that are there."""
    read = {
        "image": body.text("image", is_long=False),
        "args": body.text("args", is_long=False),
        "disk_gb": body.number("disk", least=1),
        "env": body.text_map("env"),
        "ports": body.texts("ports"),
    }
    found = {name: value for name, value in read.items() if value is not None}
    registry = body.text_or_null("registry")
    return {**found, "registry": registry} if body.has("registry") else found


def read_persistent(body: Body) -> PersistentMount:
    size_gb = body.number("size", least=MIN_PERSISTENT_GB, is_required=True)
    path = body.text("path", is_long=False, is_required=True)
    body.close()
    return PersistentMount(size_gb or MIN_PERSISTENT_GB, path or "")


def read_network(body: Body) -> NetworkMount:
    volume_id = body.text("volumeId", is_long=False, is_required=True)
    path = body.text("path", is_long=False, is_required=True)
    body.close()
    return NetworkMount(volume_id or "", path or "")


def check_config(account: EmulatedRunpodAccount, config: EmulatorConfig) -> None:
    """What the schema does not say. Raises Problem."""
    for port in config.ports:
        number, _, kind = port.partition("/")
        if not number.isdecimal() or not 1 <= int(number) <= 65535 or kind not in ("tcp", "http"):
            raise RunpodApiError(400, f"port '{port}' must be formatted as port/protocol, with tcp or http")
    if len(set(config.ports)) < len(config.ports):
        raise RunpodApiError(400, "ports must not repeat")
    if config.registry is not None and config.registry not in account.registries:
        raise RunpodApiError(400, "registry not found")


# ------------------------------------------------------------------------------------------------------ templates


def find_template(account: EmulatedRunpodAccount, id_: str) -> Template:
    """One's own, or a public one. Raises Problem."""
    template = account.templates.get(id_) or OFFICIAL.get(id_)
    if template is None:
        raise not_found("template")
    return template


def list_templates(account: EmulatedRunpodAccount, _: RunpodCall) -> RunpodAnswer:
    return RunpodAnswer(200, {"templates": [render.template(each) for each in account.templates.values()]})


def list_public_templates(_: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    source = call.one_of("source", ("official", "verified", "community"), "official")
    found = OFFICIAL.values() if source == "official" else []
    return RunpodAnswer(200, {"templates": [render.template(each) for each in found]})


def get_template(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    return RunpodAnswer(200, render.template(find_template(account, call.id)))


def create_template(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    body = call.form
    name = body.text("name", is_required=True)
    config = read_config(body)
    if "image" not in config and not body.errors:
        body.refuse("missing property 'image'")
    fields = _read_template(body)
    body.finish()
    template = Template(
        account.new_id(),
        name or "",
        EmulatorConfig(
            config["image"],
            config.get("args", ""),
            config.get("disk_gb", DEFAULT_DISK_GB),
            config.get("env", {}),
            config.get("ports", []),
            config.get("registry"),
        ),
        fields.get("persistent"),
        fields.get("is_serverless", False),
        fields.get("is_public", False),
        fields.get("category", "NVIDIA"),
        fields.get("starts_ssh", True),
        fields.get("starts_jupyter", True),
        fields.get("cuda_versions", []),
    )
    check_config(account, template.config)
    account.templates[template.id] = template
    return RunpodAnswer(201, render.template(template))


def update_template(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    template = account.templates.get(call.id)
    if template is None:
        raise not_found("template")
    body = call.form
    name, config, fields = body.text("name"), read_config(body), _read_template(body)
    body.finish()
    changed = changed_config(template.config, config)
    check_config(account, changed)
    template.name, template.config = name or template.name, changed
    for field, value in fields.items():
        setattr(template, field, value)
    return RunpodAnswer(200, render.template(template))


def delete_template(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    # No pod holds on to the template it was made from, so nothing is in the way.
    if account.templates.pop(call.id, None) is None:
        raise not_found("template")
    return RunpodAnswer(204)


def _read_template(body: Body) -> Json:
    mounts = body.object("mounts")
    persistent = mounts.object("persistent") if mounts else None
    if mounts:
        mounts.close()
    read = {
        "persistent": None if persistent is None else read_persistent(persistent),
        "is_serverless": body.flag("serverless"),
        "is_public": body.flag("public"),
        "category": body.one_of("category", CATEGORIES),
        "starts_ssh": body.flag("startSsh"),
        "starts_jupyter": body.flag("startJupyter"),
        "cuda_versions": body.texts("allowedCudaVersions", pattern=CUDA_VERSION),
    }
    return {name: value for name, value in read.items() if value is not None}


def changed_config(config: EmulatorConfig, fields: Json) -> EmulatorConfig:
    return EmulatorConfig(
        fields.get("image", config.image),
        fields.get("args", config.args),
        fields.get("disk_gb", config.disk_gb),
        fields.get("env", config.env),
        fields.get("ports", config.ports),
        fields.get("registry", config.registry),
    )


# ----------------------------------------------------------------------------------------------------- registries


def list_registries(account: EmulatedRunpodAccount, _: RunpodCall) -> RunpodAnswer:
    return RunpodAnswer(200, {"registries": [{"id": id_, "name": name} for id_, name in account.registries.items()]})


def get_registry(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    if call.id not in account.registries:
        raise not_found("registry")
    return RunpodAnswer(200, {"id": call.id, "name": account.registries[call.id]})


def create_registry(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    body = call.form
    name = body.text("name", is_required=True)
    body.text("username", is_required=True)
    body.text("password", is_required=True)
    body.finish()
    id_ = account.new_id()
    account.registries[id_] = name or ""
    return RunpodAnswer(201, {"id": id_, "name": name})


def delete_registry(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    if call.id not in account.registries:
        raise not_found("registry")
    if any(pod.config.registry == call.id for pod in account.pods.values()):
        raise RunpodApiError(400, "registry is in use by a pod")
    del account.registries[call.id]
    for template in account.templates.values():
        if template.config.registry == call.id:
            template.config.registry = None
    return RunpodAnswer(204)


# ------------------------------------------------------------------------------------------------------- SSH keys


def get_ssh_keys(account: EmulatedRunpodAccount, _: RunpodCall) -> RunpodAnswer:
    return RunpodAnswer(200, {"keys": list(account.ssh_keys)})


def update_ssh_keys(account: EmulatedRunpodAccount, call: RunpodCall) -> RunpodAnswer:
    body = call.form
    keys = body.texts("keys", pattern=_PUBLIC_KEY, is_required=True)
    body.finish()
    account.ssh_keys = list(keys or [])
    return RunpodAnswer(200, {"keys": list(account.ssh_keys)})
