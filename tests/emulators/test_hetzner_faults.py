"""Injected faults of the emulated Hetzner project, as a client sees them."""

import json
from typing import Any

import hcloud
import pytest
import requests
from hcloud.images import Image
from hcloud.locations import Location
from hcloud.server_types import ServerType

from support.emulated_project import ORDER, ProjectUnderTest
from windlass_emulators.hetzner.errors import STATUS_OF_CODE
from windlass_emulators.hetzner.faults import HetznerFaults
from windlass_emulators.http import NoAnswer


def _sdk_create(client: hcloud.Client, name: str = "worker-1") -> Any:
    kind, image, place = ServerType(name="cx23"), Image(name="ubuntu-24.04"), Location(name="nbg1")
    return client.servers.create(name=name, server_type=kind, image=image, location=place)


def test_creation_can_time_out_after_taking_effect(project: ProjectUnderTest) -> None:
    project.emulator.faults.next_create(times_out_after_taking_effect=True)
    with pytest.raises(NoAnswer):
        project.request("POST", "/servers", ORDER)
    assert project.listed() == ["worker-1"]
    assert project.request("POST", "/servers", ORDER).code == "uniqueness_error"


def test_creation_can_time_out_before_taking_effect(project: ProjectUnderTest) -> None:
    project.emulator.faults.next_create(times_out_before_taking_effect=True)
    with pytest.raises(NoAnswer):
        project.request("POST", "/servers", ORDER)
    assert project.listed() == project.listed("/primary_ips") == []
    assert project.create()["name"] == "worker-1"


def test_sdk_repeats_a_timed_out_creation(project: ProjectUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    project.emulator.faults.next_create(times_out_after_taking_effect=True)
    with pytest.raises(hcloud.APIException) as refused:
        _sdk_create(project.sdk)
    assert refused.value.code == "uniqueness_error"
    assert [(method, path) for _, method, path in project.emulator.requests] == [("POST", "/v1/servers")] * 2


def test_injected_time_out_is_a_read_timeout_in_process(
    project: ProjectUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    project.emulator.faults.next(times=100)
    with pytest.raises(requests.exceptions.ReadTimeout):
        project.sdk.servers.get_all()


@pytest.mark.parametrize("code", ["resource_unavailable", "placement_error"])
def test_no_capacity_is_per_type_and_location(project: ProjectUnderTest, code: str) -> None:
    project.emulator.faults.no_capacity("cx23", "nbg1", code=code)
    answer = project.request("POST", "/servers", ORDER)
    assert (answer.status, answer.code) == (STATUS_OF_CODE[code], code)
    assert project.create(location="fsn1")["location"]["name"] == "fsn1"
    assert project.create(server_type="cx33", name="bigger")["name"] == "bigger"
    (kind,) = project.request("GET", "/server_types?name=cx23").json["server_types"]
    assert {place["name"]: place["available"] for place in kind["locations"]} == {
        "fsn1": True,
        "nbg1": False,
        "hel1": True,
    }
    project.emulator.faults.capacity("cx23", "nbg1")
    assert project.create(name="again")["name"] == "again"


def test_no_capacity_can_expire_and_be_unannounced(project: ProjectUnderTest) -> None:
    project.emulator.faults.no_capacity("*", "*", is_announced=False, for_s=60)
    assert project.request("POST", "/servers", ORDER).code == "resource_unavailable"
    (kind,) = project.request("GET", "/server_types?name=cx23").json["server_types"]
    assert all(place["available"] for place in kind["locations"])
    project.clock.advance(60)
    assert project.create()["name"] == "worker-1"


def test_deletion_of_existing_server_can_be_denied(project: ProjectUnderTest) -> None:
    server_id = project.running()
    project.emulator.faults.next_delete("not_found")
    assert project.request("DELETE", f"/servers/{server_id}").status == 404
    assert project.status(server_id) == "running"


def test_deletion_can_time_out_after_taking_effect(project: ProjectUnderTest) -> None:
    server_id = project.running()
    project.emulator.faults.next_delete(times_out_after_taking_effect=True)
    with pytest.raises(NoAnswer):
        project.request("DELETE", f"/servers/{server_id}")
    project.clock.advance(1)
    assert project.request("DELETE", f"/servers/{server_id}").status == 404


def test_lagging_list_shows_an_earlier_state(project: ProjectUnderTest) -> None:
    old = project.running(name="old")
    project.emulator.faults.list_lags(by_s=10)
    project.clock.advance(10)
    new = project.create(name="new")["id"]
    project.request("DELETE", f"/servers/{old}")
    project.clock.advance(5)
    assert project.listed() == ["old"]
    assert len(project.listed("/primary_ips")) == 2
    assert project.listed("/servers?name=new") == []
    assert project.status(new) == "initializing"  # a single server is always up to date
    assert project.request("GET", f"/servers/{old}").status == 404
    project.clock.advance(5)
    assert project.request("GET", "/servers?name=new").json["servers"][0]["status"] == "initializing"
    project.clock.advance(7)
    assert project.listed() == ["new"]
    assert project.status(new) == "running"
    assert project.request("GET", "/servers").json["servers"][0]["status"] == "starting"
    project.emulator.faults.list_lags(by_s=0)
    assert project.request("GET", "/servers").json["servers"][0]["status"] == "running"


def test_burst_ends_after_its_times(project: ProjectUnderTest) -> None:
    project.emulator.faults.burst(times=3)
    assert [project.request("GET", "/servers").status for _ in range(4)] == [503, 503, 503, 200]
    project.emulator.faults.burst(times=1000, code="bad_gateway", for_s=5)
    assert project.request("GET", "/servers").status == 502
    project.clock.advance(5)
    assert project.request("GET", "/servers").status == 200


def test_second_page_of_a_list_can_fail(project: ProjectUnderTest) -> None:
    project.emulator.faults.next_list("unavailable", skip=1)
    assert [project.request("GET", "/servers").status for _ in range(3)] == [200, 503, 200]


@pytest.mark.parametrize("code", ["locked", "conflict", "unauthorized", "forbidden", "rate_limit_exceeded", "timeout"])
def test_any_published_code_can_be_injected(project: ProjectUnderTest, code: str) -> None:
    project.emulator.faults.next_create(code)
    answer = project.request("POST", "/servers", ORDER)
    assert (answer.status, answer.code) == (STATUS_OF_CODE[code], code)
    assert project.create()


def test_failure_can_follow_the_effect(project: ProjectUnderTest) -> None:
    project.emulator.faults.next_create("server_error", takes_effect=True)
    assert project.request("POST", "/servers", ORDER).status == 500
    assert project.listed() == ["worker-1"]


def test_rate_limit_can_be_drained(project: ProjectUnderTest) -> None:
    project.emulator.faults.drain_rate_limit()
    assert project.request("GET", "/servers").status == 429
    project.clock.advance(1)
    assert project.request("GET", "/servers").status == 200


def test_server_limit_can_be_lowered(project: ProjectUnderTest) -> None:
    project.emulator.faults.server_limit(0)
    assert project.request("POST", "/servers", ORDER).code == "resource_limit_exceeded"
    project.emulator.faults.server_limit(None)
    assert project.create()


def test_server_can_start_its_program_late_or_never(project: ProjectUnderTest) -> None:
    project.emulator.faults.next_boot(extra_s=100)
    project.emulator.faults.next_boot(is_dead=True)
    slow, dead = project.create(name="slow")["id"], project.create(name="dead")["id"]
    project.clock.advance(8)
    assert (project.status(slow), project.status(dead)) == ("running", "running")
    assert project.host.running == {}
    project.clock.advance(100)
    project.emulator.settle()
    assert set(project.host.running) == {slow}
    project.clock.advance(1000)
    project.emulator.settle()
    assert set(project.host.running) == {slow}


def test_accepted_action_can_fail(project: ProjectUnderTest) -> None:
    faults = project.emulator.faults
    faults.next_action("start_server")
    faults.next_action("attach_to_network", code="no_subnet_available")
    answered = project.request("POST", "/servers", {**ORDER, "networks": [project.network()]})
    assert answered.status == 201
    server_id = answered.json["server"]["id"]
    project.clock.advance(60)
    assert project.status(server_id) == "off"
    assert project.request("GET", f"/servers/{server_id}").json["server"]["private_net"] == []
    actions = {
        each["command"]: each for each in project.request("GET", f"/servers/{server_id}/actions").json["actions"]
    }
    assert {command: each["status"] for command, each in actions.items()} == {
        "create_server": "success",
        "start_server": "error",
        "attach_to_network": "error",
    }
    assert actions["attach_to_network"]["error"]["code"] == "no_subnet_available"
    project.request("POST", f"/servers/{server_id}/actions/poweron")
    project.clock.advance(60)
    assert project.status(server_id) == "running"
    faults.next_action("delete_server")
    assert project.request("DELETE", f"/servers/{server_id}").status == 200
    project.clock.advance(60)
    assert project.status(server_id) == "running"
    assert project.emulator.bill()["servers"][0]["deleted"] is None
    with pytest.raises(ValueError, match="reboot_server cannot fail here"):
        faults.next_action("reboot_server")


def test_crashed_server_still_reports_running(project: ProjectUnderTest) -> None:
    server_id = project.running()
    project.emulator.crash(server_id)
    assert (project.status(server_id), project.host.running) == ("running", {})
    project.request("POST", f"/servers/{server_id}/actions/reset")
    project.settle_all()
    assert project.host.is_running(server_id)


def test_late_settle_applies_each_change_at_its_own_time(project: ProjectUnderTest) -> None:
    server = project.create()
    project.clock.advance(3600)
    project.emulator.settle()
    began = project.emulator.project.servers[server["id"]].created
    changes = [
        (int((at - began).total_seconds()), what)
        for at, what in project.emulator.project.servers[server["id"]].statuses
    ]
    assert changes == [(0, "initializing"), (6, "starting"), (8, "running")]


# ----------------------------------------------------------------------------------------------------- over HTTP


def _inject(project: ProjectUnderTest, **fault: Any) -> tuple[int, Any]:
    answered = project.emulator.handle("POST", "/_emulator/faults", [], {}, json.dumps(fault).encode())
    return answered.status, json.loads(answered.body)


def test_faults_can_be_injected_over_http(project: ProjectUnderTest) -> None:
    status, shown = _inject(project, fault="next_create", times_out_after_taking_effect=True, times=2)
    assert (status, shown["scripted"][0]["times"]) == (200, 2)
    with pytest.raises(NoAnswer):
        project.request("POST", "/servers", ORDER)
    assert _inject(project, fault="no_capacity", server_type="cx23", location="nbg1")[0] == 200
    cleared = project.emulator.handle("DELETE", "/_emulator/faults", [], {}, b"")
    assert json.loads(cleared.body)["scripted"] == json.loads(cleared.body)["no_capacity"] == []


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"fault": "explode"}, "unknown fault 'explode': use one of next, "),
        ({"fault": "next_create"}, "next_create: give exactly one outcome"),
        (
            {"fault": "next_create", "code": "locked", "colour": 1},
            "next_create: HetznerFaults.next() got an unexpected",
        ),
        ({"fault": "burst", "colour": 1}, "burst: got an unexpected keyword"),
        ({"fault": "next", "code": "nonsense"}, "next: nonsense is not a published error code"),
    ],
)
def test_invalid_fault_is_refused_with_a_reason(project: ProjectUnderTest, fault: Any, problem: str) -> None:
    status, answer = _inject(project, **fault)
    assert status == 422
    assert answer["error"].startswith(problem)


def test_every_offered_fault_is_a_method() -> None:
    assert all(callable(getattr(HetznerFaults, name)) for name in HetznerFaults.METHODS)
