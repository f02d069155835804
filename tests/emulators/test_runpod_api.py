"""What the emulated Runpod account answers, and what it refuses."""

import json
from typing import Any

import pytest

from support.emulated_account import GENEROUS, GPU, IMAGE, KEY, ORDER, OTHER_GPU, AccountUnderTest
from support.runpod_contract import Contract, Judged, client_of
from windlass_emulators.runpod import RunpodEmulatorSettings
from windlass_emulators.runpod.errors import NO_CAPACITY


def test_the_contract_judges(account: AccountUnderTest) -> None:
    """A judge that lets everything pass would prove nothing."""
    Contract.find()
    assert isinstance(account.face, Judged)
    account.create()
    assert account.face.judged == 1
    pod = account.emulator.account.pods.popitem()[1]
    pod.statuses[-1] = (pod.created, "RUNNING")
    pod.name = 5  # type: ignore[assignment]
    account.emulator.account.pods[pod.id] = pod
    with pytest.raises(AssertionError, match="not as published"):
        account.ask("GET", f"/pods/{pod.id}")


# ----------------------------------------------------------------------------------------------------- a pod's life


def test_a_pod_is_provisioned_starts_runs_and_then_shows_its_ports(account: AccountUnderTest) -> None:
    made = account.create()
    assert (made["status"], made["actions"]) == ("PROVISIONING", ["stop", "terminate"])
    assert (made["cost"], made["runtime"], made["startedAt"]) == (0.69, None, None)
    assert made["ssh"] == {"proxy": None, "direct": None}
    account.clock.advance(2)
    assert account.status(made["id"]) == "STARTING"
    account.clock.advance(6)
    pod = account.pod(made["id"])
    assert (pod["status"], pod["runtime"], pod["ssh"]["direct"]) == ("RUNNING", None, None)
    assert pod["startedAt"] == "2030-01-01T00:00:08Z"
    assert account.host.is_running(made["id"])
    account.clock.advance(61)
    pod = account.pod(made["id"])
    ssh, http = pod["runtime"]["ports"]
    assert (ssh["private"], ssh["type"], ssh["ip"]) == (22, "tcp", "127.0.0.1")
    assert (http["private"], http["public"], http["ip"]) == (8888, None, None)
    assert pod["ssh"]["direct"]["port"] == ssh["public"]
    assert pod["ssh"]["direct"]["command"] == f"ssh root@127.0.0.1 -p {ssh['public']}"
    assert (pod["runtime"]["uptime"], len(pod["runtime"]["gpus"])) == (60, 1)


def test_names_repeat_and_every_request_makes_another_pod(account: AccountUnderTest) -> None:
    first, second = account.create(), account.create()
    assert first["id"] != second["id"]
    assert account.listed() == ["worker-1", "worker-1"]


def test_a_stopped_pod_costs_nothing_and_starts_again_with_other_ports(account: AccountUnderTest) -> None:
    pod_id = account.running()
    port = account.pod(pod_id)["ssh"]["direct"]["port"]
    stopped = account.act(pod_id, "stop").json
    assert (stopped["status"], stopped["cost"], stopped["runtime"]) == ("EXITED", 0.0, None)
    assert not account.host.is_running(pod_id)
    assert account.act(pod_id, "start").json["status"] == "STARTING"
    account.clock.advance(7)
    pod = account.pod(pod_id)
    assert (pod["status"], pod["cost"], len(pod["runtime"]["gpus"])) == ("RUNNING", 0.69, 1)
    assert pod["ssh"]["direct"]["port"] != port


def test_a_pod_that_is_started_again_may_find_its_gpus_taken(account: AccountUnderTest) -> None:
    pod_id = account.running()
    account.act(pod_id, "stop")
    account.emulator.faults.next_start_without_gpu()
    account.act(pod_id, "start")
    account.clock.advance(7)
    pod = account.pod(pod_id)
    assert (pod["status"], pod["gpu"]["count"], pod["runtime"]["gpus"]) == ("RUNNING", 1, [])
    assert account.host.running[pod_id].gpu_count == 0


def test_gpus_are_used_up_and_given_back(account: AccountUnderTest) -> None:
    place = {"dataCenterIds": ["US-KS-2"], "gpu": {"id": "NVIDIA H200", "count": 8}}
    first, second = account.running(**place), account.running(**place)
    assert account.refused(**place).detail == NO_CAPACITY
    account.act(first, "stop")
    third = account.running(**place)
    account.act(first, "start")
    account.clock.advance(7)
    assert account.pod(first)["runtime"]["gpus"] == []
    assert account.ask("DELETE", f"/pods/{second}").status == account.act(third, "terminate").status == 204


def test_a_restart_stays_in_place(account: AccountUnderTest) -> None:
    pod_id = account.running()
    assert account.act(pod_id, "restart").json["status"] == "STARTING"
    assert not account.host.is_running(pod_id)
    account.clock.advance(7)
    assert account.pod(pod_id)["runtime"] is not None
    assert account.host.is_running(pod_id)


def test_a_deleted_pod_is_gone_at_once(account: AccountUnderTest) -> None:
    pod_id = account.running()
    assert account.ask("DELETE", f"/pods/{pod_id}").status == 204
    assert account.ask("GET", f"/pods/{pod_id}").status == 404
    assert account.ask("DELETE", f"/pods/{pod_id}").detail == "pod not found"
    assert (account.listed(), account.host.running) == ([], {})


@pytest.mark.parametrize(
    ("status", "allowed"),
    [
        ("PROVISIONING", {"stop", "terminate"}),
        ("STARTING", {"stop", "terminate"}),
        ("RUNNING", {"stop", "restart", "terminate"}),
        ("EXITED", {"start", "terminate"}),
        ("ERROR", {"start", "terminate"}),
    ],
)
def test_only_the_published_actions_are_allowed(account: AccountUnderTest, status: str, allowed: set[str]) -> None:
    for action in ("start", "stop", "restart", "terminate"):
        if status == "ERROR":
            account.emulator.faults.next_pod(dies_after_s=0, dies_as="ERROR")
        pod_id = account.create()["id"]
        account.clock.advance({"PROVISIONING": 0, "STARTING": 2}.get(status, 9))
        if status == "EXITED":
            account.act(pod_id, "stop")
        assert account.status(pod_id) == status
        assert set(account.pod(pod_id)["actions"]) == allowed
        answered = account.act(pod_id, action)
        assert answered.status == (409 if action not in allowed else 204 if action == "terminate" else 200)


def test_what_was_about_to_happen_does_not_when_a_pod_is_stopped(account: AccountUnderTest) -> None:
    pod_id = account.create()["id"]
    account.act(pod_id, "stop")
    account.clock.advance(600)
    assert account.status(pod_id) == "EXITED"
    assert account.host.running == {}


def test_a_locked_pod_is_not_stopped(account: AccountUnderTest) -> None:
    pod_id = account.running()
    assert account.ask("PATCH", f"/pods/{pod_id}", {"locked": True}).json["locked"] is True
    assert account.act(pod_id, "stop").detail == "pod is locked"
    account.ask("PATCH", f"/pods/{pod_id}", {"locked": False})
    assert account.act(pod_id, "stop").status == 200


# -------------------------------------------------------------------------------------------------------- creation


@pytest.mark.parametrize(
    ("order", "error"),
    [
        ({"bogus": 1}, "$: additional properties 'bogus' not allowed"),
        ({"name": ""}, "$.name: length must be >= 1, but got 0"),
        ({"name": 5}, "$.name: got integer, want string"),
        ({"cloud": "MINE"}, "$.cloud: value must be one of 'SECURE', 'COMMUNITY'"),
        ({"disk": 0}, "$.disk: must be >= 1 but found 0"),
        ({"env": {"A": 1}}, "$.env.A: got integer, want string"),
        ({"ports": [22]}, "$.ports[0]: got integer, want string"),
        ({"gpu": {"count": 1}}, "$.gpu: missing property 'id'"),
        ({"gpu": {"id": GPU, "count": 0}}, "$.gpu.count: must be >= 1 but found 0"),
        ({"gpu": {"id": GPU, "kind": 1}}, "$.gpu: additional properties 'kind' not allowed"),
        ({"gpu": {"id": GPU, "minCudaVersion": "12"}}, "$.gpu.minCudaVersion: '12' does not match"),
        ({"mounts": {"persistent": {"size": 5, "path": "/w"}}}, "$.mounts.persistent.size: must be >= 10"),
        ({"mounts": {"network": [{"path": "/w"}]}}, "$.mounts.network[0]: missing property 'volumeId'"),
        ({"mounts": {"other": 1}}, "$.mounts: additional properties 'other' not allowed"),
        ({"templateId": ""}, "$.templateId: length must be >= 1"),
    ],
)
def test_a_body_that_breaks_the_schema_is_422_with_the_place(
    account: AccountUnderTest, order: dict[str, Any], error: str
) -> None:
    refused = account.refused(**order)
    assert (refused.status, refused.detail) == (422, "Request validation failed.")
    assert refused.errors[0].startswith(error)
    assert account.listed() == []


def test_all_violations_are_said_at_once(account: AccountUnderTest) -> None:
    refused = account.ask("POST", "/pods", {"disk": 0, "extra": 1})
    assert refused.errors == [
        "$: missing property 'name'",
        "$.disk: must be >= 1 but found 0",
        "$: missing property 'image'",
        "$: additional properties 'extra' not allowed",
    ]


@pytest.mark.parametrize(
    ("order", "detail"),
    [
        ({"gpu": None}, "exactly one of gpu or cpu"),
        ({"cpu": {"id": "cpu5c", "vcpuCount": 4}}, "exactly one of gpu or cpu"),
        ({"gpu": {"id": "NVIDIA Abacus"}}, "gpu type 'NVIDIA Abacus' not found"),
        ({"gpu": {"id": GPU, "count": 9}}, "gpu.count must be at most 8"),
        ({"gpu": {"id": GPU, "allowedCudaVersions": ["12.8"], "minCudaVersion": "12.1"}}, "mutually exclusive"),
        ({"gpu": {"id": GPU, "allowedCudaVersions": ["9.9"]}}, NO_CAPACITY),
        ({"gpu": {"id": GPU, "minCudaVersion": "12.11"}, "dataCenterIds": ["AP-JP-1"]}, NO_CAPACITY),
        ({"gpu": {"id": "NVIDIA H200"}, "dataCenterIds": ["AP-JP-1"]}, NO_CAPACITY),
        ({"gpu": {"id": "NVIDIA H200"}, "cloud": "COMMUNITY"}, "gpu.count must be at most 0"),
        ({"dataCenterIds": ["MOON-1"]}, "data center 'MOON-1' not found"),
        ({"ports": ["22"]}, "port '22' must be formatted as port/protocol"),
        ({"ports": ["22/tcp", "22/tcp"]}, "must not repeat"),
        ({"registry": "nope"}, "registry not found"),
        ({"mounts": {"network": [{"volumeId": "nope", "path": "/w"}]}}, "network volume 'nope' not found"),
        ({"globalNetworking": True, "dataCenterIds": ["AP-JP-1"]}, "global networking needs"),
    ],
)
def test_a_body_that_breaks_a_rule_is_400(account: AccountUnderTest, order: dict[str, Any], detail: str) -> None:
    whole = {name: value for name, value in {**ORDER, **order}.items() if value is not None}
    refused = account.ask("POST", "/pods", whole)
    assert (refused.status, refused.errors) == (400, [])
    assert detail in refused.detail


def test_cuda_versions_are_compared_as_numbers(account: AccountUnderTest) -> None:
    pod = account.create(gpu={"id": GPU, "minCudaVersion": "12.5", "allowedCudaVersions": []})
    assert pod["cudaVersion"] == "13.0"
    assert account.create(gpu={"id": GPU, "allowedCudaVersions": ["12.4", "12.6"]})["cudaVersion"] == "12.6"


def test_a_pod_goes_where_its_volume_is(account: AccountUnderTest) -> None:
    volume = account.volume()
    mounts = {"network": [{"volumeId": volume["id"], "path": "/workspace"}]}
    pod = account.create(mounts=mounts)
    assert (pod["dataCenterId"], pod["mounts"]) == ("EU-RO-1", mounts)
    assert "not in a requested data center" in account.refused(mounts=mounts, dataCenterIds=["US-KS-2"]).detail
    assert "community" in account.refused(mounts=mounts, cloud="COMMUNITY").detail
    both = {**mounts, "persistent": {"size": 20, "path": "/w"}}
    assert "mutually exclusive" in account.refused(mounts=both).detail


def test_a_cpu_pod_needs_a_power_of_two_and_has_no_disk_of_its_own(account: AccountUnderTest) -> None:
    order = {name: value for name, value in ORDER.items() if name != "gpu"}
    cpu = {**order, "cpu": {"id": "cpu5c", "vcpuCount": 4}}
    made = account.ask("POST", "/pods", cpu).json
    assert (made["cpu"], made["cost"]) == ({"id": "cpu5c", "vcpuCount": 4, "memory": 8}, 0.14)
    assert "gpu" not in made
    assert account.ask("POST", "/pods", {**cpu, "cpu": {"id": "cpu5c", "vcpuCount": 6}}).status == 400
    disk = {"persistent": {"size": 20, "path": "/w"}}
    assert "not allowed on CPU pods" in account.ask("POST", "/pods", {**cpu, "mounts": disk}).detail


def test_a_template_fills_in_what_is_not_said(account: AccountUnderTest) -> None:
    fields = {"name": "t", "image": "mine:1", "disk": 30, "env": {"A": "1", "B": "1"}, "startJupyter": False}
    template = account.ask("POST", "/templates", {**fields, "mounts": {"persistent": {"size": 20, "path": "/w"}}}).json
    order = {"name": "worker-1", "gpu": {"id": GPU}, "templateId": template["id"], "env": {"B": "2"}}
    pod = account.ask("POST", "/pods", order).json
    assert (pod["image"], pod["disk"], pod["env"], pod["template"]) == ("mine:1", 30, {"A": "1", "B": "2"}, None)
    assert pod["mounts"] == {"persistent": {"size": 20, "path": "/w"}}
    assert account.ask("POST", "/pods", {**order, "templateId": "nope"}).status == 404
    account.ask("PATCH", f"/templates/{template['id']}", {"serverless": True})
    assert account.ask("POST", "/pods", order).status == 422
    assert account.ask("DELETE", f"/templates/{template['id']}").status == 204
    assert account.ask("GET", f"/templates/{template['id']}").status == 404
    assert account.ask("POST", "/templates", {"name": "t"}).errors == ["$: missing property 'image'"]


def test_a_public_template_can_be_used_but_not_changed(account: AccountUnderTest) -> None:
    (torch, _) = account.ask("GET", "/catalog/templates").json["templates"]
    assert account.ask("GET", f"/templates/{torch['id']}").json == torch
    assert account.ask("PATCH", f"/templates/{torch['id']}", {"name": "x"}).status == 404
    assert account.ask("GET", "/catalog/templates?source=community").json["templates"] == []
    assert account.ask("GET", "/templates").json["templates"] == []
    order = {"name": "w", "gpu": {"id": GPU}, "templateId": torch["id"]}
    assert "22/tcp" in account.ask("POST", "/pods", order).json["ports"]


def test_registered_keys_reach_a_pod_that_asks_for_ssh(account: AccountUnderTest) -> None:
    assert "PUBLIC_KEY" not in account.create(startSsh=True)["env"]
    assert account.ask("PUT", "/account/ssh-keys", {"keys": ["no key"]}).status == 422
    assert account.ask("PUT", "/account/ssh-keys", {"keys": [KEY]}).json == {"keys": [KEY]}
    assert account.ask("GET", "/account/ssh-keys").json == {"keys": [KEY]}
    assert account.create(startSsh=True)["env"]["PUBLIC_KEY"] == KEY
    assert account.create(startSsh=True, env={"PUBLIC_KEY": "mine"})["env"] == {"PUBLIC_KEY": "mine"}
    assert "PUBLIC_KEY" not in account.create()["env"]


def test_a_registry_in_use_is_not_deleted(account: AccountUnderTest) -> None:
    registry = account.ask("POST", "/registries", {"name": "r", "username": "u", "password": "p"}).json
    assert set(registry) == {"id", "name"}
    template = account.ask("POST", "/templates", {"name": "t", "image": "i", "registry": registry["id"]}).json
    pod_id = account.create(registry=registry["id"])["id"]
    assert account.ask("DELETE", f"/registries/{registry['id']}").status == 400
    account.ask("DELETE", f"/pods/{pod_id}")
    assert account.ask("GET", "/registries").json["registries"] == [registry]
    assert account.ask("DELETE", f"/registries/{registry['id']}").status == 204
    assert account.ask("GET", f"/registries/{registry['id']}").status == 404
    assert account.ask("GET", f"/templates/{template['id']}").json["registry"] is None


# ---------------------------------------------------------------------------------------------------------- updates


def test_only_what_is_said_is_changed(account: AccountUnderTest) -> None:
    pod_id = account.create(env={"A": "1"})["id"]
    changed = account.ask("PATCH", f"/pods/{pod_id}", {"name": "other", "env": {"B": "2"}, "ports": []}).json
    assert (changed["name"], changed["env"], changed["ports"], changed["image"]) == ("other", {"B": "2"}, [], IMAGE)
    assert account.ask("PATCH", f"/pods/{pod_id}", {"gpu": {"id": OTHER_GPU}}).status == 422
    assert account.ask("PATCH", f"/pods/{pod_id}", {"ports": ["x"]}).status == 400
    assert account.ask("PATCH", "/pods/nope", {"name": "other"}).status == 404
    template = account.ask("POST", "/templates", {"name": "t", "image": "new:2", "env": {"C": "3"}}).json
    changed = account.ask("PATCH", f"/pods/{pod_id}", {"templateId": template["id"]}).json
    assert (changed["image"], changed["env"]) == ("new:2", {"C": "3"})


@pytest.mark.parametrize(
    ("made_with", "changed_to", "detail"),
    [
        (None, {"persistent": {"size": 20, "path": "/w"}}, "fixed at create"),
        ("network", {"persistent": {"size": 20, "path": "/w"}}, "fixed at create"),
        ("network", {"network": []}, "cannot be cleared"),
        ("network", {"network": [{"volumeId": "other", "path": "/w"}]}, "immutable"),
        ("network", {"network": [{"volumeId": "VOLUME", "path": "/elsewhere"}]}, None),
        ("network", {}, None),
    ],
)
def test_a_mount_keeps_its_kind(
    account: AccountUnderTest, made_with: str | None, changed_to: dict[str, Any], detail: str | None
) -> None:
    volume_id = account.volume()["id"]
    mounts = {"network": [{"volumeId": volume_id, "path": "/w"}]} if made_with else {}
    pod_id = account.create(mounts=mounts)["id"]
    body = {"mounts": json.loads(json.dumps(changed_to).replace("VOLUME", volume_id))}
    answered = account.ask("PATCH", f"/pods/{pod_id}", body)
    assert answered.status == (200 if detail is None else 400)
    assert detail is None or detail in answered.detail


# ---------------------------------------------------------------------------------------------------------- volumes


def test_a_volume_only_grows(account: AccountUnderTest) -> None:
    volume = account.volume(size=50)
    path = f"/network-volumes/{volume['id']}"
    assert volume["type"] == "STANDARD"
    assert account.ask("PATCH", path, {"size": 100}).json["size"] == 100
    assert account.ask("PATCH", path, {"size": 99}).detail == "network volume size cannot be reduced"
    assert account.ask("PATCH", path, {"size": 4096, "name": "big"}).json["name"] == "big"
    assert account.ask("PATCH", path, {"size": 4097}).errors == ["$.size: must be <= 4096 but found 4097"]
    assert account.ask("PATCH", path, {}).status == 422
    assert account.ask("PATCH", "/network-volumes/nope", {"size": 20}).status == 404
    assert account.ask("GET", "/network-volumes").json["networkVolumes"] == [account.ask("GET", path).json]
    assert account.ask("DELETE", path).status == 204
    assert account.ask("GET", path).status == 404


@pytest.mark.parametrize(
    ("order", "status"),
    [
        ({"size": 9}, 422),
        ({"size": "big"}, 422),
        ({"type": "FLOPPY"}, 422),
        ({"dataCenter": "MOON-1"}, 400),
        ({"dataCenter": "AP-JP-1"}, 400),
        ({"dataCenter": "US-TX-3", "type": "HIGH_PERFORMANCE"}, 400),
    ],
)
def test_a_volume_may_be_refused(account: AccountUnderTest, order: dict[str, Any], status: int) -> None:
    whole = {"name": "data", "size": 100, "dataCenter": "EU-RO-1", **order}
    assert account.ask("POST", "/network-volumes", whole).status == status


def test_a_volume_in_use_is_not_deleted_and_its_pods_see_it_grow(account: AccountUnderTest) -> None:
    volume = account.volume()
    pod_id = account.running(mounts={"network": [{"volumeId": volume["id"], "path": "/workspace"}]})
    assert account.ask("DELETE", f"/network-volumes/{volume['id']}").status == 400
    account.emulator.fill_volume(volume["id"], 95)
    account.ask("PATCH", f"/network-volumes/{volume['id']}", {"size": 200})
    (mount,) = account.host.running[pod_id].mounts
    assert (mount.path, mount.size_gb, mount.used_gb) == ("/workspace", 200, 95)


# ---------------------------------------------------------------------------------------------------------- catalog


def test_the_catalog_has_prices_and_on_request_stock(account: AccountUnderTest) -> None:
    gpus = {each["id"]: each for each in account.ask("GET", "/catalog/gpus").json["gpus"]}
    assert gpus[GPU]["price"] == {"secure": 0.69, "community": 0.34, "serverless": 1.725}
    assert "availability" not in gpus[GPU]
    assert gpus["NVIDIA H200"]["community"] is False
    one = account.ask("GET", f"/catalog/gpus/{GPU}?include=AVAILABILITY&product=POD").json
    assert one["availability"] == "HIGH"
    assert {each["id"]: each["availability"] for each in one["dataCenters"]}["EU-RO-1"] == "HIGH"
    assert {"version": "12.8", "available": True} in one["cudaVersions"]
    assert account.ask("GET", "/catalog/gpus/nope").status == 404


def test_stock_follows_what_is_taken(account: AccountUnderTest) -> None:
    where = {"dataCenterIds": ["US-KS-2"], "gpu": {"id": "NVIDIA H200", "count": 7}}
    query = "/catalog/gpus/NVIDIA H200?include=AVAILABILITY&product=POD&countryCodes=US"
    levels = []
    for _ in range(3):
        found = account.ask("GET", query).json
        levels.append((found["availability"], [each["id"] for each in found.get("dataCenters", [])]))
        account.ask("POST", "/pods", {**ORDER, **where})
    assert levels == [("HIGH", ["US-KS-2"]), ("HIGH", ["US-KS-2"]), ("LOW", ["US-KS-2"])]
    account.create(dataCenterIds=["US-KS-2"], gpu={"id": "NVIDIA H200", "count": 2})
    found = account.ask("GET", query).json
    assert (found["availability"], "dataCenters" in found) == ("NONE", False)
    (place,) = [
        each
        for each in account.ask("GET", "/catalog/datacenters?include=GPU_AVAILABILITY").json["dataCenters"]
        if each["id"] == "US-KS-2"
    ]
    assert {each["id"]: each["availability"] for each in place["gpuAvailability"]}["NVIDIA H200"] == "NONE"


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("include=AVAILABILITY", 400),
        ("product=POD", 400),
        ("count=2", 400),
        ("include=EVERYTHING&product=POD", 422),
        ("include=AVAILABILITY&product=TOASTER", 422),
        ("include=AVAILABILITY&product=POD&count=0", 422),
        ("include=AVAILABILITY&product=POD&countryCodes=us", 422),
        ("include=AVAILABILITY&product=POD&cudaVersions=12", 422),
        ("include=AVAILABILITY&product=POD&cudaVersions=12.8&minCudaVersion=12", 400),
        ("include=AVAILABILITY&product=POD&minCudaVersion=12", 200),
        ("include=AVAILABILITY&product=POD,SERVERLESS&cloud=COMMUNITY&countryCodes=RO,JP&cudaVersions=12.6", 200),
    ],
)
def test_what_the_catalog_may_be_asked(account: AccountUnderTest, query: str, status: int) -> None:
    assert account.ask("GET", f"/catalog/gpus?{query}").status == status


def test_data_centers_are_filtered(account: AccountUnderTest) -> None:
    def found(query: str) -> list[str]:
        return [each["id"] for each in account.ask("GET", f"/catalog/datacenters?{query}").json["dataCenters"]]

    assert found("regions=ASIA") == ["AP-JP-1"]
    assert found("networkVolumeTypes=STANDARD,HIGH_PERFORMANCE") == ["US-KS-2", "EU-RO-1"]
    assert found("regions=EUROPE&compliance=GDPR&globalNetwork=false") == ["EU-CZ-1"]
    assert account.ask("GET", "/catalog/datacenters?regions=MOON").status == 422
    place = account.ask("GET", "/catalog/datacenters/EU-RO-1?include=GPU_AVAILABILITY,CPU_AVAILABILITY").json
    assert len(place["gpuAvailability"]) == 10
    assert len(place["cpuAvailability"]) == 3
    assert account.ask("GET", "/catalog/datacenters/nope").status == 404


def test_cpus_are_in_the_catalog_too(account: AccountUnderTest) -> None:
    (first, *_) = account.ask("GET", "/catalog/cpus?include=AVAILABILITY&product=POD&vcpuCount=4").json["cpus"]
    assert (first["id"], first["availability"]) == ("cpu3c", "HIGH")
    assert account.ask("GET", "/catalog/cpus/cpu5c").json["price"]["securePerVcpu"] == 0.035
    assert account.ask("GET", "/catalog/cpus?include=AVAILABILITY&product=POD&vcpuCount=6").status == 422
    assert account.ask("GET", "/catalog/cpus/nope").status == 404


# ----------------------------------------------------------------------------------------------- logs and the rest


def test_logs_are_events_that_can_be_resumed(account: AccountUnderTest) -> None:
    pod_id = account.running()
    events = account.send("GET", f"/pods/{pod_id}/logs").body.decode()
    first, second, third = events.strip().split("\n\n")
    assert json.loads(third.partition("data: ")[2]) == {
        "ts": "2030-01-01T00:00:08Z", "source": "system", "line": "start container",
    }  # fmt: skip
    assert account.send("GET", f"/pods/{pod_id}/logs?tail=1").body.decode().strip() == third
    assert account.send("GET", f"/pods/{pod_id}/logs?tail=0").body == b""
    assert account.send("GET", f"/pods/{pod_id}/logs?source=container").body == b""
    assert account.send("GET", f"/pods/{pod_id}/logs?since=2030-01-01T00:00:02Z").body.decode().startswith(second)
    cursor = second.split("\n")[0].removeprefix("id: ")
    headers = {"Authorization": "Bearer any", "Last-Event-ID": cursor}
    assert account.send("GET", f"/pods/{pod_id}/logs", headers=headers).body.decode().strip() == third
    assert first.startswith("id: 2030-01-01T00:00:00Z/000000000001\n")
    assert account.ask("GET", f"/pods/{pod_id}/logs?tail=5001").status == 422
    assert account.ask("GET", "/pods/nope/logs").status == 404


def test_a_request_needs_a_key(account: AccountUnderTest) -> None:
    refused = account.ask("GET", "/pods", headers={})
    assert (refused.status, refused.detail) == (401, "missing bearer token")
    assert "RateLimit" not in refused.headers
    strict = AccountUnderTest(Contract.find_or_none(), RunpodEmulatorSettings(key="right"))
    assert strict.ask("GET", "/pods").detail == "invalid bearer token"
    assert strict.ask("GET", "/pods", headers={"authorization": "Bearer right"}).status == 200


def test_requests_are_counted_in_windows() -> None:
    account = AccountUnderTest(
        Contract.find_or_none(), RunpodEmulatorSettings(requests_per_minute=2, requests_per_hour=3)
    )
    account.clock.advance(48)
    assert account.ask("GET", "/pods").headers["RateLimit"].startswith('"minute";r=1;t=12, "hour";r=2;t=3552, ')
    policy = '"minute";q=2;w=60, "hour";q=3;w=3600, "day";q=50000;w=86400'
    assert account.ask("GET", "/pods").headers["RateLimit-Policy"] == policy
    refused = account.ask("GET", "/pods")
    assert (refused.status, refused.headers["Retry-After"]) == (429, "12")
    assert refused.detail == "rate limit exceeded for the minute window"
    account.clock.advance(12)
    assert account.ask("GET", "/pods").status == 200
    refused = account.ask("GET", "/pods")
    assert (refused.detail, refused.headers["Retry-After"]) == ("rate limit exceeded for the hour window", "3540")


@pytest.mark.parametrize("root", ["clusters", "serverless"])
def test_what_is_not_emulated_is_empty_and_says_so(account: AccountUnderTest, root: str) -> None:
    name = {"serverless": "endpoints"}.get(root, root)
    assert account.ask("GET", f"/{root}").json == {name: []}
    assert account.ask("GET", f"/{root}/x").status == 404
    assert "the emulator does not do this" in account.ask("POST", f"/{root}", {}).detail


def test_an_unknown_path_and_a_wrong_method_are_said(account: AccountUnderTest) -> None:
    bare = AccountUnderTest(None, GENEROUS)
    assert bare.ask("GET", "/nowhere").status == 404
    refused = bare.ask("PUT", "/pods", {})
    assert (refused.status, refused.headers["Allow"]) == (405, "GET, POST")
    assert account.ask("POST", "/pods", b"{").detail == "request body is not valid JSON"
    assert account.ask("POST", "/pods", b"[]").status == 422


def test_httpx_speaks_to_it_without_a_network(account: AccountUnderTest) -> None:
    client = client_of(account.face)
    made = client.post("/pods", json=ORDER)
    assert made.status_code == 201
    assert client.get("/catalog/gpus/NVIDIA%20L40S").json()["name"] == "L40S"
    assert client.delete(f"/pods/{made.json()['id']}").status_code == 204
