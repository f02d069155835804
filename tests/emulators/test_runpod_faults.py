"""Injected faults of the emulated Runpod account, as a client sees them."""

import json
from datetime import timedelta
from typing import Any

import httpx
import pytest

from support.emulated_account import GPU, ORDER, OTHER_GPU, AccountUnderTest
from support.runpod_contract import client_of
from windlass_emulators.http import NoAnswer
from windlass_emulators.runpod.errors import NO_CAPACITY
from windlass_emulators.runpod.faults import RunpodFaults


def test_failed_creation_can_have_taken_effect(account: AccountUnderTest) -> None:
    account.emulator.faults.next_create(500, takes_effect=True)
    refused = account.refused()
    assert (refused.status, refused.json["title"]) == (500, "Internal Server Error")
    assert account.listed() == ["worker-1"]


def test_creation_can_time_out_before_or_after_taking_effect(account: AccountUnderTest) -> None:
    account.emulator.faults.next_create(times_out_after_taking_effect=True)
    with pytest.raises(NoAnswer):
        account.create()
    assert account.listed() == ["worker-1"]
    account.emulator.faults.next_create(times_out_before_taking_effect=True)
    with pytest.raises(httpx.ReadTimeout):
        client_of(account.api).post("/pods", json=ORDER)
    assert account.listed() == ["worker-1"]


def test_no_capacity_is_per_type_cloud_and_data_center(account: AccountUnderTest) -> None:
    account.emulator.faults.no_capacity(GPU, "SECURE", "EU-RO-1")
    here = {"dataCenterIds": ["EU-RO-1"]}
    refused = account.refused(**here)
    assert (refused.status, refused.detail) == (400, NO_CAPACITY)
    assert refused.detail.startswith("There are no longer any instances available with the requested specifications.")
    assert account.create(**here, cloud="COMMUNITY")["cloud"] == "COMMUNITY"
    assert account.create(**here, gpu={"id": OTHER_GPU})["gpu"]["id"] == OTHER_GPU
    assert account.create(dataCenterIds=["EU-RO-1", "US-KS-2"])["dataCenterId"] == "US-KS-2"
    stock = account.request("GET", f"/catalog/gpus/{GPU}?include=AVAILABILITY&product=POD").json
    assert {each["id"]: each["availability"] for each in stock["dataCenters"]}["EU-RO-1"] == "NONE"
    account.emulator.faults.capacity(GPU, "SECURE", "EU-RO-1")
    assert account.create(**here)["dataCenterId"] == "EU-RO-1"


def test_no_capacity_can_expire_and_be_unannounced(account: AccountUnderTest) -> None:
    account.emulator.faults.no_capacity(is_announced=False, for_s=60)
    assert account.refused().detail == NO_CAPACITY
    stock = account.request("GET", f"/catalog/gpus/{GPU}?include=AVAILABILITY&product=POD").json
    assert stock["availability"] == "HIGH"
    account.clock.advance(60)
    assert account.create()


def test_pod_can_run_without_a_runtime(account: AccountUnderTest) -> None:
    account.emulator.faults.next_pod(never_has_runtime=True)
    pod_id = account.create()["id"]
    account.clock.advance(86_400)
    pod = account.pod(pod_id)
    assert (pod["status"], pod["runtime"], pod["ssh"]["direct"], pod["cost"]) == ("RUNNING", None, None, 0.69)
    assert account.host.running == {}


def test_pod_can_have_no_gpu(account: AccountUnderTest) -> None:
    account.emulator.faults.next_pod(has_no_gpu=True)
    pod_id, other_id = account.running(), account.running()
    assert account.pod(pod_id)["runtime"]["gpus"] == []
    assert (account.host.running[pod_id].gpu_count, account.host.running[other_id].gpu_count) == (0, 1)
    account.emulator.lose_gpus(other_id)
    assert account.host.running[other_id].gpu_count == 0


def test_image_pull_can_be_slow_or_never_end(account: AccountUnderTest) -> None:
    account.emulator.faults.next_pod(stays_starting=True)
    account.emulator.faults.next_pod(extra_boot_s=100)
    stuck, slow = account.create()["id"], account.create()["id"]
    account.clock.advance(107)
    assert (account.status(stuck), account.status(slow)) == ("STARTING", "STARTING")
    account.clock.advance(1)
    assert account.status(slow) == "RUNNING"
    account.clock.advance(86_400)
    assert account.status(stuck) == "STARTING"


@pytest.mark.parametrize(("status", "cost"), [("EXITED", 0.0), ("ERROR", 0.69)])
def test_pod_can_exit_by_itself(account: AccountUnderTest, status: str, cost: float) -> None:
    account.emulator.faults.next_pod(dies_after_s=60, dies_as=status)
    pod_id = account.running()
    account.clock.advance(60)
    pod = account.pod(pod_id)
    assert (pod["status"], pod["runtime"], pod["cost"]) == (status, None, cost)
    assert account.host.running == {}


def test_crashed_pod_still_reports_running(account: AccountUnderTest) -> None:
    pod_id = account.running()
    account.emulator.crash(pod_id)
    assert account.host.running == {}
    assert account.pod(pod_id)["runtime"] is not None


def test_lagging_list_shows_an_earlier_state(account: AccountUnderTest) -> None:
    old = account.running(name="old")
    account.emulator.faults.list_lags(by_s=10)
    account.clock.advance(10)
    new = account.create(name="new")["id"]
    account.request("DELETE", f"/pods/{old}")
    account.clock.advance(5)
    assert account.listed() == ["old"]
    assert account.status(new) == "STARTING"  # a single pod is always up to date
    assert account.request("GET", f"/pods/{old}").status == 404
    account.clock.advance(5)
    (shown,) = account.request("GET", "/pods").json["pods"]
    assert (shown["name"], shown["status"], account.status(new)) == ("new", "PROVISIONING", "RUNNING")
    account.emulator.faults.list_lags(by_s=0)
    assert account.request("GET", "/pods").json["pods"][0]["status"] == "RUNNING"


def test_new_pod_can_be_hidden(account: AccountUnderTest) -> None:
    account.emulator.faults.new_pods_hide(for_s=5)
    pod_id = account.create()["id"]
    assert (
        account.request("GET", f"/pods/{pod_id}").status == account.request("DELETE", f"/pods/{pod_id}").status == 404
    )
    assert account.listed() == ["worker-1"]
    account.clock.advance(5)
    assert account.status(pod_id) == "STARTING"


def test_deletion_can_answer_without_effect(account: AccountUnderTest) -> None:
    pod_id = account.running()
    account.emulator.faults.next_delete(does_nothing=True, times=2)
    assert account.request("DELETE", f"/pods/{pod_id}").status == 204
    assert account.act(pod_id, "terminate").status == 204
    assert account.status(pod_id) == "RUNNING"
    assert account.request("DELETE", f"/pods/{pod_id}").status == 204
    assert account.listed() == []


def test_deletion_can_be_denied_or_time_out_after_effect(account: AccountUnderTest) -> None:
    pod_id = account.running()
    account.emulator.faults.next_delete(404)
    assert account.request("DELETE", f"/pods/{pod_id}").status == 404
    assert account.status(pod_id) == "RUNNING"
    account.emulator.faults.next_delete(times_out_after_taking_effect=True)
    with pytest.raises(NoAnswer):
        account.request("DELETE", f"/pods/{pod_id}")
    assert account.listed() == []


def test_empty_balance_refuses_pods(account: AccountUnderTest) -> None:
    pod_id = account.running()
    account.emulator.faults.no_balance()
    refused = account.refused()
    assert (refused.status, refused.json["title"]) == (402, "Payment Required")
    assert "balance is too low" in refused.detail
    account.act(pod_id, "stop")
    assert account.act(pod_id, "start").status == 402
    account.emulator.faults.balance()
    assert account.create()


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 409, 422, 429, 500, 502, 503, 504])
def test_any_error_status_can_be_injected(account: AccountUnderTest, status: int) -> None:
    path = "/pods" if status != 429 else ".*"
    account.emulator.faults.next(status, method="POST", path=f"/v2{path}", detail="as it is", retry_after_s=3)
    refused = account.refused()
    assert (refused.status, refused.detail, refused.headers["Content-Type"]) == (
        status, "as it is", "application/problem+json",
    )  # fmt: skip
    assert account.create()


def test_validation_errors_can_be_injected(account: AccountUnderTest) -> None:
    account.emulator.faults.next(422, errors=["$.image: is forbidden"])
    assert account.refused().errors == ["$.image: is forbidden"]


def test_throttling_returns_retry_after(account: AccountUnderTest) -> None:
    account.emulator.faults.throttle(times=2, retry_after_s=7)
    refused = account.request("GET", "/pods")
    assert (refused.status, refused.headers["Retry-After"]) == (429, "7")
    assert account.refused().status == 429
    account.emulator.faults.drain_rate_limit("hour")
    refused = account.request("GET", "/pods")
    assert (refused.status, refused.headers["Retry-After"]) == (429, "3600")
    account.clock.advance(3600)
    assert account.request("GET", "/pods").status == 200


def test_burst_ends_after_its_times(account: AccountUnderTest) -> None:
    account.emulator.faults.burst(times=3)
    assert [account.request("GET", "/pods").status for _ in range(4)] == [503, 503, 503, 200]
    account.emulator.faults.burst(times=1000, status=502, for_s=5)
    assert account.request("GET", "/pods").status == 502
    account.clock.advance(5)
    assert account.request("GET", "/pods").status == 200


def test_list_and_single_pod_fail_independently(account: AccountUnderTest) -> None:
    pod_id = account.running()
    account.emulator.faults.next_list(500)
    account.emulator.faults.next_get(404)
    assert account.request("GET", f"/pods/{pod_id}").status == 404
    assert account.request("GET", "/pods").status == 500
    assert account.listed() == ["worker-1"]


def test_late_settle_applies_each_change_at_its_own_time(account: AccountUnderTest) -> None:
    account.emulator.faults.next_pod(dies_after_s=60)
    pod_id = account.create()["id"]
    account.clock.advance(86_400)
    account.emulator.settle()
    pod = account.emulator.account.pods[pod_id]
    changes = [((at - pod.created).total_seconds(), what) for at, what in pod.statuses]
    assert changes == [(0, "PROVISIONING"), (2, "STARTING"), (8, "RUNNING"), (68, "EXITED")]
    assert account.emulator.bill()["pods"][0]["seconds"] == 68


# --------------------------------------------------------------------------------------------------- over HTTP


def _control(account: AccountUnderTest, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    data = b"" if body is None else json.dumps(body).encode()
    response = account.api.handle(method, f"/_emulator/{path}", [], {}, data)
    return response.status, json.loads(response.body)


def test_faults_can_be_injected_over_http(account: AccountUnderTest) -> None:
    status, shown = _control(
        account, "POST", "faults", {"fault": "next_create", "status": 500, "takes_effect": True, "times": 2}
    )
    assert (status, shown["scripted"][0]["answers"], shown["scripted"][0]["times"]) == (200, 500, 2)
    assert account.refused().status == 500
    script = {"fault": "next_pod", "has_no_gpu": True, "ssh_failures": {"start.sh": "no such file"}}
    assert _control(account, "POST", "faults", script)[1]["next_pods"][0]["has_no_gpu"] is True
    _control(account, "POST", "faults", {"fault": "no_capacity", "gpu": GPU})
    status, shown = _control(account, "DELETE", "faults")
    assert (shown["scripted"], shown["no_capacity"], shown["next_pods"]) == ([], [], [])
    assert account.create()


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ({}, "unknown fault"),
        ({"fault": "clear_all"}, "unknown fault"),
        ({"fault": "next_create"}, "give exactly one outcome"),
        ({"fault": "next_create", "status": 200}, "not an error status"),
        ({"fault": "next_pod", "colour": "red"}, "unexpected keyword"),
        ({"fault": "next_pod", "dies_as": "SLEEPING"}, "EXITED or ERROR"),
        ({"fault": "drain_rate_limit", "window": "year"}, "minute, hour or day"),
    ],
)
def test_invalid_fault_is_refused_with_a_reason(
    account: AccountUnderTest, script: dict[str, Any], problem: str
) -> None:
    status, shown = _control(account, "POST", "faults", script)
    assert status == 422
    assert problem in shown["error"]


def test_control_endpoints_show_and_change_pods(account: AccountUnderTest) -> None:
    volume = account.volume()
    pod_id = account.running(mounts={"network": [{"volumeId": volume["id"], "path": "/workspace"}]})
    expected = {"pod_id": pod_id, "name": "worker-1", "status": "RUNNING", "is_running": True}
    assert _control(account, "GET", "machines")[1]["machines"] == [expected]
    assert _control(account, "POST", f"machines/{pod_id}/lose-gpus")[0] == 200
    assert account.host.running[pod_id].gpu_count == 0
    assert _control(account, "POST", f"volumes/{volume['id']}/fill", {"used_gb": 99})[0] == 200
    assert account.host.running[pod_id].mounts[0].used_gb == 99
    assert _control(account, "POST", f"machines/{pod_id}/crash")[1]["machines"] == [{**expected, "is_running": False}]
    assert _control(account, "POST", "machines/nope/crash")[0] == 404
    assert _control(account, "POST", "volumes/nope/fill", {"used_gb": 1})[0] == 404
    assert _control(account, "POST", f"volumes/{volume['id']}/fill", {})[0] == 422
    assert _control(account, "GET", "nothing")[0] == 404
    assert _control(account, "GET", "clock")[1]["now"] == account.clock.now.isoformat()


def test_every_offered_fault_is_a_method() -> None:
    assert all(callable(getattr(RunpodFaults, name)) for name in RunpodFaults.METHODS)


def test_old_deleted_pods_leave_lagging_lists(account: AccountUnderTest) -> None:
    pod_id = account.running()
    account.request("DELETE", f"/pods/{pod_id}")
    account.clock.now += timedelta(hours=2)
    account.emulator.faults.list_lags(by_s=10_000)
    assert account.listed() == []
