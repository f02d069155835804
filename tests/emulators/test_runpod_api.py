"""The emulated Runpod API: published schemas, error texts and timing."""

from dataclasses import replace
from typing import Any

import pytest

from support.emulated_account import GENEROUS, GPU, ORDER, AccountUnderTest
from support.runpod_contract import CheckedEmulator, Contract, client_of
from windlass_emulators.runpod import RunpodEmulatorSettings
from windlass_emulators.runpod.errors import NO_CAPACITY


def test_contract_check_detects_a_violation(account: AccountUnderTest) -> None:
    Contract.find()
    assert isinstance(account.api, CheckedEmulator)
    account.create()
    assert account.api.checked == 1
    pod = account.emulator.account.pods.popitem()[1]
    pod.statuses[-1] = (pod.created, "RUNNING")
    pod.name = 5  # type: ignore[assignment]
    account.emulator.account.pods[pod.id] = pod
    with pytest.raises(AssertionError, match="not as published"):
        account.request("GET", f"/pods/{pod.id}")


# ----------------------------------------------------------------------------------------------------- lifecycle


def test_pod_can_be_running_without_a_runtime_from_the_first_answer() -> None:
    settings = replace(GENEROUS, provisioning_s=0, starting_s=0, runtime_s=30)
    account = AccountUnderTest(Contract.find_or_none(), settings)
    made = account.create()
    assert (made["status"], made["runtime"], made["cost"]) == ("RUNNING", None, 0.69)
    account.clock.advance(29)
    assert account.pod(made["id"])["runtime"] is None
    account.clock.advance(1)
    assert account.pod(made["id"])["runtime"] is not None


def test_pod_boots_through_the_published_states(account: AccountUnderTest) -> None:
    made = account.create()
    assert (made["status"], made["actions"]) == ("PROVISIONING", ["stop", "terminate"])
    assert (made["cost"], made["runtime"], made["startedAt"]) == (0.69, None, None)
    assert made["ssh"] == {"proxy": None, "direct": None}
    account.clock.advance(2)
    assert account.status(made["id"]) == "STARTING"
    account.clock.advance(6)
    pod = account.pod(made["id"])
    assert (pod["status"], pod["runtime"], pod["ssh"]["direct"]) == ("RUNNING", None, None)
    assert (pod["createdAt"], pod["startedAt"]) == ("2030-01-01T00:00:00.000Z", "2030-01-01T00:00:08.000Z")
    assert account.host.is_running(made["id"])
    account.clock.advance(61)
    pod = account.pod(made["id"])
    ssh, http = pod["runtime"]["ports"]
    assert (ssh["private"], ssh["type"], ssh["ip"]) == (22, "tcp", "127.0.0.1")
    assert (http["private"], http["public"], http["ip"]) == (8888, None, None)
    assert pod["ssh"]["direct"]["port"] == ssh["public"]
    assert pod["ssh"]["direct"]["command"] == f"ssh root@127.0.0.1 -p {ssh['public']}"
    assert (pod["runtime"]["uptime"], len(pod["runtime"]["gpus"])) == (60, 1)


def test_names_are_not_unique(account: AccountUnderTest) -> None:
    first, second = account.create(), account.create()
    assert first["id"] != second["id"]
    assert account.listed() == ["worker-1", "worker-1"]


def test_stopped_pod_is_free_and_restarts_with_new_ports(account: AccountUnderTest) -> None:
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


def test_restarted_pod_can_lose_its_gpus(account: AccountUnderTest) -> None:
    pod_id = account.running()
    account.act(pod_id, "stop")
    account.emulator.faults.next_start_without_gpu()
    account.act(pod_id, "start")
    account.clock.advance(7)
    pod = account.pod(pod_id)
    assert (pod["status"], pod["gpu"]["count"], pod["runtime"]["gpus"]) == ("RUNNING", 1, [])
    assert account.host.running[pod_id].gpu_count == 0


def test_gpu_stock_is_used_and_returned(account: AccountUnderTest) -> None:
    place = {"dataCenterIds": ["US-KS-2"], "gpu": {"id": "NVIDIA H200", "count": 8}}
    first, second = account.running(**place), account.running(**place)
    assert account.refused(**place).detail == NO_CAPACITY
    account.act(first, "stop")
    third = account.running(**place)
    account.act(first, "start")
    account.clock.advance(7)
    assert account.pod(first)["runtime"]["gpus"] == []
    assert account.request("DELETE", f"/pods/{second}").status == account.act(third, "terminate").status == 204


def test_restart_keeps_the_pod(account: AccountUnderTest) -> None:
    pod_id = account.running()
    assert account.act(pod_id, "restart").json["status"] == "STARTING"
    assert not account.host.is_running(pod_id)
    account.clock.advance(7)
    assert account.pod(pod_id)["runtime"] is not None
    assert account.host.is_running(pod_id)


def test_deleted_pod_disappears_at_once(account: AccountUnderTest) -> None:
    pod_id = account.running()
    assert account.request("DELETE", f"/pods/{pod_id}").status == 204
    assert account.request("GET", f"/pods/{pod_id}").status == 404
    assert account.request("DELETE", f"/pods/{pod_id}").detail == "pod not found"
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
def test_only_published_actions_are_allowed_per_status(
    account: AccountUnderTest, status: str, allowed: set[str]
) -> None:
    for action in ("start", "stop", "restart", "terminate"):
        if status == "ERROR":
            account.emulator.faults.next_pod(dies_after_s=0, dies_as="ERROR")
        pod_id = account.create()["id"]
        account.clock.advance({"PROVISIONING": 0, "STARTING": 2}.get(status, 9))
        if status == "EXITED":
            account.act(pod_id, "stop")
        assert account.status(pod_id) == status
        assert set(account.pod(pod_id)["actions"]) == allowed
        answer = account.act(pod_id, action)
        assert answer.status == (409 if action not in allowed else 204 if action == "terminate" else 200)


def test_stop_cancels_scheduled_changes(account: AccountUnderTest) -> None:
    pod_id = account.create()["id"]
    account.act(pod_id, "stop")
    account.clock.advance(600)
    assert account.status(pod_id) == "EXITED"
    assert account.host.running == {}


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
def test_schema_violation_is_422_with_its_place(account: AccountUnderTest, order: dict[str, Any], error: str) -> None:
    answer = account.refused(**order)
    assert (answer.status, answer.detail) == (422, "Request validation failed.")
    assert answer.errors[0].startswith(error)
    assert account.listed() == []


def test_all_violations_are_reported_together(account: AccountUnderTest) -> None:
    answer = account.request("POST", "/pods", {"disk": 0, "extra": 1})
    assert answer.errors == [
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
        ({"gpu": None, "cpu": {"id": "cpu5c", "vcpuCount": 4}}, "the emulator does not support CPU pods"),
        ({"globalNetworking": True}, "the emulator does not support global networking"),
    ],
)
def test_rule_violation_is_400(account: AccountUnderTest, order: dict[str, Any], detail: str) -> None:
    whole = {name: value for name, value in {**ORDER, **order}.items() if value is not None}
    answer = account.request("POST", "/pods", whole)
    assert (answer.status, answer.errors) == (400, [])
    assert detail in answer.detail


def test_cuda_versions_are_compared_as_numbers(account: AccountUnderTest) -> None:
    pod = account.create(gpu={"id": GPU, "minCudaVersion": "12.5", "allowedCudaVersions": []})
    assert pod["cudaVersion"] == "13.0"
    assert account.create(gpu={"id": GPU, "allowedCudaVersions": ["12.4", "12.6"]})["cudaVersion"] == "12.6"


def test_pod_is_placed_where_its_volume_is(account: AccountUnderTest) -> None:
    volume = account.volume()
    mounts = {"network": [{"volumeId": volume["id"], "path": "/workspace"}]}
    pod = account.create(mounts=mounts)
    assert (pod["dataCenterId"], pod["mounts"]) == ("EU-RO-1", mounts)
    assert "not in a requested data center" in account.refused(mounts=mounts, dataCenterIds=["US-KS-2"]).detail
    assert "community" in account.refused(mounts=mounts, cloud="COMMUNITY").detail
    both = {**mounts, "persistent": {"size": 20, "path": "/w"}}
    assert "mutually exclusive" in account.refused(mounts=both).detail


def test_template_provides_the_defaults_of_a_pod(account: AccountUnderTest) -> None:
    fields = {"name": "t", "image": "mine:1", "disk": 30, "env": {"A": "1", "B": "1"}, "startJupyter": False}
    body = {**fields, "mounts": {"persistent": {"size": 20, "path": "/w"}}}
    template = account.request("POST", "/templates", body).json
    order = {"name": "worker-1", "gpu": {"id": GPU}, "templateId": template["id"], "env": {"B": "2"}}
    pod = account.request("POST", "/pods", order).json
    assert (pod["image"], pod["disk"], pod["env"], pod["template"]) == ("mine:1", 30, {"A": "1", "B": "2"}, None)
    assert pod["mounts"] == {"persistent": {"size": 20, "path": "/w"}}
    assert account.request("POST", "/pods", {**order, "templateId": "nope"}).status == 404
    assert account.request("POST", "/templates", {"name": "t"}).errors == ["$: missing property 'image'"]


def test_pod_can_name_a_registry(account: AccountUnderTest) -> None:
    registry = account.request("POST", "/registries", {"name": "r", "username": "u", "password": "p"}).json
    assert set(registry) == {"id", "name"}
    assert account.create(registry=registry["id"])["registry"] == registry["id"]
    assert account.request("GET", f"/registries/{registry['id']}").json == registry
    assert account.request("GET", "/registries/nope").status == 404


# ---------------------------------------------------------------------------------------------------------- volumes


def test_volume_can_only_grow(account: AccountUnderTest) -> None:
    volume = account.volume(size=50)
    path = f"/network-volumes/{volume['id']}"
    assert volume["type"] == "STANDARD"
    assert account.request("PATCH", path, {"size": 100}).json["size"] == 100
    assert account.request("PATCH", path, {"size": 99}).detail == "network volume size cannot be reduced"
    assert account.request("PATCH", path, {"size": 4096, "name": "big"}).json["name"] == "big"
    assert account.request("PATCH", path, {"size": 4097}).errors == ["$.size: must be <= 4096 but found 4097"]
    assert account.request("PATCH", path, {}).status == 422
    assert account.request("PATCH", "/network-volumes/nope", {"size": 20}).status == 404
    assert account.request("GET", "/network-volumes").json["networkVolumes"] == [account.request("GET", path).json]
    assert account.request("DELETE", path).status == 204
    assert account.request("GET", path).status == 404


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
def test_invalid_volume_is_refused(account: AccountUnderTest, order: dict[str, Any], status: int) -> None:
    whole = {"name": "data", "size": 100, "dataCenter": "EU-RO-1", **order}
    assert account.request("POST", "/network-volumes", whole).status == status


def test_volume_in_use_is_kept_and_grows_in_its_pods(account: AccountUnderTest) -> None:
    volume = account.volume()
    pod_id = account.running(mounts={"network": [{"volumeId": volume["id"], "path": "/workspace"}]})
    assert account.request("DELETE", f"/network-volumes/{volume['id']}").status == 400
    account.emulator.fill_volume(volume["id"], 95)
    account.request("PATCH", f"/network-volumes/{volume['id']}", {"size": 200})
    (mount,) = account.host.running[pod_id].mounts
    assert (mount.path, mount.size_gb, mount.used_gb) == ("/workspace", 200, 95)


# ---------------------------------------------------------------------------------------------------------- catalog


def test_catalog_has_prices_and_availability_on_request(account: AccountUnderTest) -> None:
    gpus = {each["id"]: each for each in account.request("GET", "/catalog/gpus").json["gpus"]}
    assert gpus[GPU]["price"] == {"secure": 0.69, "community": 0.34, "serverless": 1.725}
    assert "availability" not in gpus[GPU]
    assert gpus["NVIDIA H200"]["community"] is False
    one = account.request("GET", f"/catalog/gpus/{GPU}?include=AVAILABILITY&product=POD").json
    assert one["availability"] == "HIGH"
    assert {each["id"]: each["availability"] for each in one["dataCenters"]}["EU-RO-1"] == "HIGH"
    assert {"version": "12.8", "available": True} in one["cudaVersions"]
    assert account.request("GET", "/catalog/gpus/nope").status == 404


def test_availability_follows_the_stock(account: AccountUnderTest) -> None:
    where = {"dataCenterIds": ["US-KS-2"], "gpu": {"id": "NVIDIA H200", "count": 7}}
    query = "/catalog/gpus/NVIDIA H200?include=AVAILABILITY&product=POD&countryCodes=US"
    levels = []
    for _ in range(3):
        found = account.request("GET", query).json
        levels.append((found["availability"], [each["id"] for each in found.get("dataCenters", [])]))
        account.request("POST", "/pods", {**ORDER, **where})
    assert levels == [("HIGH", ["US-KS-2"]), ("HIGH", ["US-KS-2"]), ("LOW", ["US-KS-2"])]
    account.create(dataCenterIds=["US-KS-2"], gpu={"id": "NVIDIA H200", "count": 2})
    found = account.request("GET", query).json
    assert (found["availability"], "dataCenters" in found) == ("NONE", False)


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
def test_catalog_query_is_validated(account: AccountUnderTest, query: str, status: int) -> None:
    assert account.request("GET", f"/catalog/gpus?{query}").status == status


# ----------------------------------------------------------------------------------------------- requests


def test_request_needs_a_key(account: AccountUnderTest) -> None:
    answer = account.request("GET", "/pods", headers={})
    assert (answer.status, answer.detail) == (401, "missing bearer token")
    assert "RateLimit" not in answer.headers
    strict = AccountUnderTest(Contract.find_or_none(), RunpodEmulatorSettings(key="right"))
    assert strict.request("GET", "/pods").detail == "invalid bearer token"
    assert strict.request("GET", "/pods", headers={"authorization": "Bearer right"}).status == 200


def test_requests_are_counted_per_window() -> None:
    account = AccountUnderTest(
        Contract.find_or_none(), RunpodEmulatorSettings(requests_per_minute=2, requests_per_hour=3)
    )
    account.clock.advance(48)
    assert account.request("GET", "/pods").headers["RateLimit"].startswith('"minute";r=1;t=12, "hour";r=2;t=3552, ')
    policy = '"minute";q=2;w=60, "hour";q=3;w=3600, "day";q=50000;w=86400'
    assert account.request("GET", "/pods").headers["RateLimit-Policy"] == policy
    answer = account.request("GET", "/pods")
    assert (answer.status, answer.headers["Retry-After"]) == (429, "12")
    assert answer.detail == "rate limit exceeded for the minute window"
    account.clock.advance(12)
    assert account.request("GET", "/pods").status == 200
    answer = account.request("GET", "/pods")
    assert (answer.detail, answer.headers["Retry-After"]) == ("rate limit exceeded for the hour window", "3540")


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/clusters"), ("POST", "/serverless"), ("GET", "/billing/pods"), ("GET", "/catalog/cpus/cpu5c")],
)
def test_unsupported_operation_is_refused_with_its_path(account: AccountUnderTest, method: str, path: str) -> None:
    assert account.request(method, path, {}).detail == f"the emulator does not support /v2{path}"


def test_unknown_path_and_method_are_refused(account: AccountUnderTest) -> None:
    bare = AccountUnderTest(None, GENEROUS)
    assert bare.request("GET", "/nowhere").status == 404
    answer = bare.request("PUT", "/pods", {})
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, POST")
    assert account.request("POST", "/pods", b"{").detail == "request body is not valid JSON"
    assert account.request("POST", "/pods", b"[]").status == 422


def test_httpx_works_without_a_network(account: AccountUnderTest) -> None:
    client = client_of(account.api)
    made = client.post("/pods", json=ORDER)
    assert made.status_code == 201
    assert client.get("/catalog/gpus/NVIDIA%20L40S").json()["name"] == "L40S"
    assert client.delete(f"/pods/{made.json()['id']}").status_code == 204
