"""The emulated project answers as Hetzner publishes: shapes, codes, and what happens when."""

import json
from typing import Any

import pytest

from support.emulated_project import HEADERS, ORDER, ProjectUnderTest
from support.hetzner_contract import Contract
from windlass_emulators.hetzner import HetznerEmulatorSettings
from windlass_emulators.hetzner.routes import _ROUTES
from windlass_emulators.hetzner.selectors import parse_selector

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJtQ2uSg6nTn3fWbWQWQ4mYv2n0b3PTZ8aB1G0u0JqLk someone@somewhere"


def _number(answered: Any, root: str) -> int:
    return int(answered.json[root]["id"])


# ---------------------------------------------------------------------------------------------------------- life


def test_a_server_is_initializing_then_starting_then_running(project: ProjectUnderTest) -> None:
    server = project.create(user_data="#cloud-config\n")
    seen = [(0.0, server["status"], False)]
    for _ in range(9):
        project.clock.advance(1)
        now_s = (project.clock.now.timestamp()) % 3600
        seen.append((now_s, project.status(server["id"]), project.host.is_running(server["id"])))
    assert seen == [
        *((float(s), "initializing", False) for s in range(6)),
        *((float(s), "starting", False) for s in (6, 7)),
        *((float(s), "running", True) for s in (8, 9)),
    ]


def test_creation_answers_with_its_actions_and_they_progress(project: ProjectUnderTest) -> None:
    made = project.ask("POST", "/servers", ORDER).json
    assert (made["action"]["command"], made["action"]["status"], made["action"]["progress"]) == (
        "create_server",
        "running",
        0,
    )
    assert [each["command"] for each in made["next_actions"]] == ["start_server"]
    project.clock.advance(4)
    started = project.ask("GET", f"/actions/{made['next_actions'][0]['id']}").json["action"]
    assert (started["status"], started["progress"], started["finished"]) == ("running", 50, None)
    project.clock.advance(4)
    by_id = project.ask("GET", f"/actions?id={made['action']['id']}&id={made['next_actions'][0]['id']}").json["actions"]
    assert [(each["status"], each["progress"]) for each in by_id] == [("success", 100)] * 2
    assert by_id[1]["finished"] == "2030-01-01T00:00:08Z"


def test_a_server_that_is_not_to_be_started_is_off(project: ProjectUnderTest) -> None:
    server = project.create(start_after_create=False)
    project.settled()
    assert project.status(server["id"]) == "off"
    assert not project.host.is_running(server["id"])


def test_while_an_action_runs_the_server_is_locked(project: ProjectUnderTest) -> None:
    server = project.create()
    assert project.ask("GET", f"/servers/{server['id']}").json["server"]["locked"]
    refused = project.ask("DELETE", f"/servers/{server['id']}")
    assert (refused.status, refused.code) == (423, "locked")
    project.clock.advance(8)
    assert project.ask("DELETE", f"/servers/{server['id']}").status == 200


def test_a_deleted_server_is_deleting_for_a_moment_and_then_not_found(project: ProjectUnderTest) -> None:
    server_id = project.running()
    assert project.ask("DELETE", f"/servers/{server_id}").json["action"]["command"] == "delete_server"
    assert (project.status(server_id), project.host.running) == ("deleting", {})
    assert project.ask("DELETE", f"/servers/{server_id}").code == "locked"
    project.clock.advance(1)
    assert project.ask("GET", f"/servers/{server_id}").code == "not_found"
    assert project.ask("DELETE", f"/servers/{server_id}").status == 404
    assert project.listed() == project.listed("/primary_ips") == []
    assert project.ask("GET", f"/servers/{server_id}/actions?sort=id:desc").json["actions"][0]["status"] == "success"


@pytest.mark.parametrize(
    ("action", "at_once", "is_running_at_once", "later", "is_running_later"),
    [
        ("poweroff", "stopping", False, "off", False),
        ("shutdown", "stopping", False, "off", False),
        ("reboot", "running", False, "running", True),
        ("reset", "running", False, "running", True),
        ("poweron", "running", True, "running", True),
    ],
)
def test_power(
    project: ProjectUnderTest,
    action: str,
    at_once: str,
    is_running_at_once: bool,
    later: str,
    is_running_later: bool,
) -> None:
    server_id = project.running()
    assert project.ask("POST", f"/servers/{server_id}/actions/{action}").status == 201
    assert (project.status(server_id), project.host.is_running(server_id)) == (at_once, is_running_at_once)
    project.settled()
    assert (project.status(server_id), project.host.is_running(server_id)) == (later, is_running_later)


def test_a_server_that_was_off_comes_back_with_the_same_disk(project: ProjectUnderTest) -> None:
    server_id = project.running(user_data="#cloud-config\n")
    project.ask("POST", f"/servers/{server_id}/actions/poweroff")
    project.settled()
    project.ask("POST", f"/servers/{server_id}/actions/poweron")
    assert project.status(server_id) == "starting"
    project.settled()
    assert project.host.running[server_id].user_data == "#cloud-config\n"


def test_a_rebuilt_server_takes_its_new_user_data(project: ProjectUnderTest) -> None:
    server_id = project.running(user_data="#cloud-config\n")
    body = {"image": "debian-12", "user_data": "#cloud-config\n# other\n"}
    assert project.ask("POST", f"/servers/{server_id}/actions/rebuild", body).json["root_password"]
    assert project.status(server_id) == "rebuilding"
    project.settled()
    assert project.ask("GET", f"/servers/{server_id}").json["server"]["image"]["name"] == "debian-12"
    assert project.host.running[server_id].user_data.endswith("# other\n")


def test_a_protected_server_cannot_be_deleted(project: ProjectUnderTest) -> None:
    server_id = project.running()
    project.ask("POST", f"/servers/{server_id}/actions/change_protection", {"delete": True, "rebuild": True})
    assert project.ask("DELETE", f"/servers/{server_id}").code == "protected"
    assert project.ask("POST", f"/servers/{server_id}/actions/rebuild", {"image": "debian-12"}).code == "protected"


def test_name_and_labels_can_be_changed(project: ProjectUnderTest) -> None:
    server_id = project.running(labels={"a": "1"})
    project.ask("PUT", f"/servers/{server_id}", {"labels": {"b": "2"}})
    changed = project.ask("PUT", f"/servers/{server_id}", {"name": "other"}).json["server"]
    assert (changed["name"], changed["labels"]) == ("other", {"b": "2"})
    project.running(name="second")
    assert project.ask("PUT", f"/servers/{server_id}", {"name": "second"}).code == "uniqueness_error"


# ------------------------------------------------------------------------------------------------------ refusals

_LONG = "x" * 64


@pytest.mark.parametrize(
    ("order", "field"),
    [
        pytest.param({"name": "worker_1"}, "name", id="a name may have no underscore"),
        pytest.param({"name": "-worker"}, "name", id="a name may not begin with a dash"),
        pytest.param({"name": _LONG}, "name", id="a part of a name has at most 63 characters"),
        pytest.param({"name": ""}, "name", id="a name is required"),
        pytest.param({"server_type": "cx99"}, "server_type", id="an unknown type"),
        pytest.param({"location": "mars1"}, "location", id="an unknown location"),
        pytest.param({"image": "windows-95"}, "image", id="an unknown image"),
        pytest.param({"image": 161547270}, "image", id="an image of another architecture"),
        pytest.param({"labels": {"a": _LONG}}, "labels", id="a label's value has at most 63 characters"),
        pytest.param({"labels": {_LONG: "a"}}, "labels", id="a label's key has at most 63 characters"),
        pytest.param({"labels": {"hetzner.cloud/a": "b"}}, "labels", id="a reserved prefix"),
        pytest.param({"labels": {"a": "b c"}}, "labels", id="a label's value may have no space"),
        pytest.param({"labels": {"a": 1}}, "labels", id="a label's value is text"),
        pytest.param({"user_data": "#" * 32769}, "user_data", id="user_data has at most 32 KiB"),
        pytest.param({"user_data": "ä" * 16385}, "user_data", id="counted in bytes"),
        pytest.param({"networks": [1]}, "networks", id="an unknown network"),
        pytest.param({"ssh_keys": ["nobody"]}, "ssh_keys", id="an unknown key"),
        pytest.param({"firewalls": [{"firewall": 1}]}, "firewalls", id="an unknown firewall"),
        pytest.param(
            {"public_net": {"enable_ipv4": False, "enable_ipv6": False}}, "public_net", id="no way to reach it"
        ),
        pytest.param({"start_after_create": "yes"}, "start_after_create", id="a flag is no word"),
    ],
)
def test_invalid_input_names_the_field(project: ProjectUnderTest, order: dict[str, Any], field: str) -> None:
    refused = project.ask("POST", "/servers", {**ORDER, **order})
    assert (refused.status, refused.code) == (422, "invalid_input")
    assert [each["name"] for each in refused.json["error"]["details"]["fields"]] == [field]
    assert project.listed() == project.listed("/primary_ips") == []


def test_all_that_is_wrong_is_said_at_once(project: ProjectUnderTest) -> None:
    fields = project.ask("POST", "/servers", {}).json["error"]["details"]["fields"]
    assert {each["name"] for each in fields} == {"name", "server_type", "image"}


@pytest.mark.parametrize(
    ("order", "status", "code", "message"),
    [
        ({"server_type": "cx22"}, 422, "invalid_input", "deprecated"),
        ({"location": "ash"}, 422, "invalid_input", "unsupported location for server type"),
        ({"name": "taken"}, 409, "uniqueness_error", "name is already used"),
    ],
)
def test_what_cannot_be_had(
    project: ProjectUnderTest, order: dict[str, Any], status: int, code: str, message: str
) -> None:
    project.create(name="taken")
    refused = project.ask("POST", "/servers", {**ORDER, **order})
    assert (refused.status, refused.code) == (status, code)
    assert message in refused.json["error"]["message"]


def test_the_retired_type_says_so_in_the_catalog(project: ProjectUnderTest) -> None:
    (found,) = project.ask("GET", "/server_types?name=cx22").json["server_types"]
    assert found["deprecated"] and found["locations"][0]["deprecation"]["unavailable_after"] < "2026-02"
    assert not any(place["available"] for place in found["locations"])


def test_a_project_has_a_limit_of_servers() -> None:
    project = ProjectUnderTest(Contract.find_or_none(), HetznerEmulatorSettings(server_limit=1))
    project.create()
    refused = project.ask("POST", "/servers", {**ORDER, "name": "worker-2"})
    assert (refused.status, refused.code) == (403, "resource_limit_exceeded")
    assert refused.json["error"]["details"] == {"limits": [{"name": "server_limit"}]}


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "code"),
    [
        pytest.param("GET", "/servers", None, {"Host": "x"}, "unauthorized", id="without a token"),
        pytest.param("GET", "/servers", None, {"Authorization": "Bearer  "}, "unauthorized", id="an empty token"),
        pytest.param("GET", "/servers/1", None, HEADERS, "not_found", id="no such server"),
        pytest.param("POST", "/servers", b"{", HEADERS, "json_error", id="no JSON"),
        pytest.param("POST", "/servers", b"[]", HEADERS, "json_error", id="no object"),
        pytest.param("GET", "/actions", None, HEADERS, "deprecated_api_endpoint", id="all actions"),
        pytest.param("GET", "/servers?page=0", None, HEADERS, "invalid_input", id="page zero"),
        pytest.param("GET", "/servers?sort=colour", None, HEADERS, "invalid_input", id="an unknown order"),
        pytest.param("GET", "/servers?label_selector=a+b", None, HEADERS, "invalid_input", id="a bad selector"),
        pytest.param("POST", "/volumes", {"size": 10}, HEADERS, "unsupported_error", id="what is not emulated"),
        pytest.param("POST", "/servers/1/actions/enable_rescue", {}, HEADERS, "unsupported_error", id="nor this"),
    ],
)
def test_refusals(
    project: ProjectUnderTest, method: str, path: str, body: Any, headers: dict[str, str], code: str
) -> None:
    assert project.ask(method, path, body, headers).code == code


def test_paths_outside_the_contract() -> None:
    project = ProjectUnderTest(None)
    assert project.ask("GET", "/nothing").code == "not_found"
    assert project.ask("PUT", "/servers").code == "method_not_allowed"


def test_one_token_only_where_that_is_wanted() -> None:
    project = ProjectUnderTest(Contract.find_or_none(), HetznerEmulatorSettings(token="right"))
    assert project.ask("GET", "/servers").code == "unauthorized"
    assert project.ask("GET", "/servers", headers={"Authorization": "Bearer right"}).status == 200
    for token, status in (("right", 200), ("wrong", 401)):
        headers = {"Authorization": f"Bearer {token}"}
        assert project.emulator.handle("GET", "/_emulator/ledger", (), headers, b"").status == status
    assert project.emulator.handle("GET", "/_emulator/ledger", (), {}, b"").status == 401


def test_a_parameter_that_is_not_published_is_noticed() -> None:
    contract = Contract.find()
    contract.check_request("GET", "/v1/servers", [("label_selector", "a=b"), ("page", "2"), ("sort", "id:asc")], b"")
    for query in ([("labels", "a=b")], [("page", "two")], [("name", "a"), ("name", "b")], [("sort", "up")]):
        with pytest.raises(AssertionError, match="request GET /v1/servers"):
            contract.check_request("GET", "/v1/servers", query, b"")


# --------------------------------------------------------------------------------------------------------- lists


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [
        ("", "abcd"),
        ("env=prod", "a"),
        ("env==prod", "a"),
        ("env == prod", "a"),
        ("env!=prod", "bcd"),
        ("env", "abc"),
        ("!env", "d"),
        ("env in (prod,test)", "ab"),
        ("env in (prod, test),tier=1", "b"),
        ("env notin (prod,test)", "cd"),
        ("env=", "c"),
        ("example.com/kind=x", "d"),
        ("env,!tier", "ac"),
        ("tier!=1,env!=prod", "cd"),
        ("env=nothing", ""),
    ],
)
def test_label_selectors(selector: str, chosen: str) -> None:
    labels: dict[str, dict[str, str]] = {
        "a": {"env": "prod"},
        "b": {"env": "test", "tier": "1"},
        "c": {"env": ""},
        "d": {"example.com/kind": "x"},
    }
    selects = parse_selector(selector)
    assert "".join(name for name, own in labels.items() if selects(own)) == chosen


def test_lists_come_in_pages_with_links(project: ProjectUnderTest) -> None:
    for number in range(60):
        project.create(name=f"worker-{number:02}", labels={"half": str(number % 2)})
    first = project.ask("GET", "/servers?per_page=50&label_selector=half")
    assert len(first.json["servers"]) == 50
    assert first.json["meta"]["pagination"] == {
        "page": 1,
        "per_page": 50,
        "previous_page": None,
        "next_page": 2,
        "last_page": 2,
        "total_entries": 60,
    }
    query = "per_page=50&label_selector=half"
    assert first.headers["Link"] == (
        f'<http://hetzner.test/v1/servers?page=2&{query}>; rel="next", '
        f'<http://hetzner.test/v1/servers?page=2&{query}>; rel="last"'
    )
    assert len(project.ask("GET", "/servers?per_page=50&page=2").json["servers"]) == 10
    assert len(project.ask("GET", "/servers").json["servers"]) == 25
    assert len(project.ask("GET", "/servers?per_page=500").json["servers"]) == 50
    assert project.ask("GET", "/servers?page=9").json["servers"] == []
    assert len(project.sdk.servers.get_all(label_selector="half=1")) == 30


def test_lists_are_filtered_and_sorted(project: ProjectUnderTest) -> None:
    project.running(name="b")
    project.create(name="a")
    assert project.listed("/servers?name=a") == ["a"]
    assert project.listed("/servers?status=running") == ["b"]
    assert project.listed("/servers?status=running&status=initializing&sort=name") == ["a", "b"]
    assert project.listed("/servers?sort=created:desc") == ["a", "b"]
    assert project.listed("/images?name=ubuntu-24.04&architecture=arm") == ["ubuntu-24.04"]


def test_requests_are_counted_and_come_back_one_a_second(project: ProjectUnderTest) -> None:
    headers = project.ask("GET", "/locations").headers
    assert (headers["RateLimit-Limit"], headers["RateLimit-Remaining"]) == ("3600", "3599")
    assert int(headers["RateLimit-Reset"]) == int(project.clock.now.timestamp()) + 1
    for _ in range(3599):
        project.emulator.handle("GET", "/v1/locations", [], HEADERS, b"")
    refused = project.ask("GET", "/locations")
    assert (refused.status, refused.code) == (429, "rate_limit_exceeded")
    assert refused.headers["RateLimit-Remaining"] == "0"
    assert int(refused.headers["RateLimit-Reset"]) == int(project.clock.now.timestamp()) + 3600
    project.clock.advance(2)
    assert [project.ask("GET", "/locations").status for _ in range(3)] == [200, 200, 429]


# ------------------------------------------------------------------------------------------------- the rest of it


def test_a_primary_ip_of_its_own_outlives_its_server(project: ProjectUnderTest) -> None:
    body = {"name": "mine", "type": "ipv4", "assignee_type": "server", "location": "nbg1", "labels": {"a": "b"}}
    ip_id = _number(project.ask("POST", "/primary_ips", body), "primary_ip")
    assert project.ask("POST", "/primary_ips", body).code == "uniqueness_error"
    server_id = project.running(public_net={"ipv4": ip_id, "enable_ipv6": False})
    assert project.ask("GET", f"/primary_ips/{ip_id}").json["primary_ip"]["assignee_id"] == server_id
    assert project.ask("DELETE", f"/primary_ips/{ip_id}").code == "must_be_unassigned"
    assert project.ask("POST", f"/primary_ips/{ip_id}/actions/unassign").code == "server_not_stopped"
    project.ask("DELETE", f"/servers/{server_id}")
    project.settled()
    assert project.listed("/primary_ips?label_selector=a=b") == ["mine"]
    assert project.ask("DELETE", f"/primary_ips/{ip_id}").status == 204
    assert project.listed("/primary_ips") == []


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"type": "ipv6"}, "primary_ip_version_mismatch"),
        ({"location": "fsn1"}, "primary_ip_datacenter_mismatch"),
    ],
)
def test_a_primary_ip_that_does_not_fit_is_refused(project: ProjectUnderTest, change: Any, code: str) -> None:
    body = {"name": "mine", "type": "ipv4", "assignee_type": "server", "location": "nbg1", **change}
    ip_id = _number(project.ask("POST", "/primary_ips", body), "primary_ip")
    assert project.ask("POST", "/servers", {**ORDER, "public_net": {"ipv4": ip_id}}).code == code


def test_a_primary_ip_can_be_moved_between_servers_that_are_off(project: ProjectUnderTest) -> None:
    server_id = project.running(public_net={"enable_ipv4": False})
    project.ask("POST", f"/servers/{server_id}/actions/poweroff")
    project.settled()
    body = {"name": "mine", "type": "ipv4", "assignee_type": "server", "assignee_id": server_id}
    made = project.ask("POST", "/primary_ips", body)
    assert made.json["action"]["command"] == "assign_primary_ip"
    project.clock.advance(1)
    ip_id = _number(made, "primary_ip")
    assert project.ask("POST", f"/primary_ips/{ip_id}/actions/unassign").status == 201
    project.clock.advance(1)
    again = {"assignee_type": "server", "assignee_id": server_id}
    assert project.ask("POST", f"/primary_ips/{ip_id}/actions/assign", again).status == 201
    assert project.ask("PUT", f"/primary_ips/{ip_id}", {"auto_delete": True}).json["primary_ip"]["auto_delete"]
    project.clock.advance(1)
    project.ask("DELETE", f"/servers/{server_id}")
    project.settled()
    assert project.listed("/primary_ips") == []


def test_a_server_gets_an_address_in_its_network(project: ProjectUnderTest) -> None:
    subnets = [{"type": "cloud", "ip_range": "10.0.1.0/24", "network_zone": "eu-central"}]
    made = project.ask("POST", "/networks", {"name": "net", "ip_range": "10.0.0.0/16", "subnets": subnets})
    network_id = _number(made, "network")
    private = {"networks": [network_id], "public_net": {"enable_ipv4": False, "enable_ipv6": False}}
    nets = [project.create(name=f"worker-{i}", **private)["private_net"][0]["ip"] for i in range(2)]
    assert nets == ["10.0.1.2", "10.0.1.3"]
    assert len(project.ask("GET", f"/networks/{network_id}").json["network"]["servers"]) == 2
    assert project.listed("/primary_ips") == []
    elsewhere = {"name": "overseas", "server_type": "cpx11", "location": "ash", "networks": [network_id]}
    refused = project.ask("POST", "/servers", {**ORDER, **elsewhere})
    assert refused.code == "no_subnet_available"
    assert len(project.listed()) == 2
    added = project.ask(
        "POST", f"/networks/{network_id}/actions/add_subnet", {"type": "cloud", "network_zone": "us-east"}
    )
    assert added.status == 201
    assert project.ask("GET", f"/networks/{network_id}").json["network"]["subnets"][1]["ip_range"] == "10.0.0.0/24"
    project.settled()
    server_id = project.ask("GET", "/servers?name=worker-0").json["servers"][0]["id"]
    body = {"network": network_id}
    assert (
        project.ask("POST", f"/servers/{server_id}/actions/attach_to_network", body).code == "server_already_attached"
    )
    assert project.ask("POST", f"/servers/{server_id}/actions/detach_from_network", body).status == 201
    project.clock.advance(1)
    assert project.ask("POST", f"/servers/{server_id}/actions/attach_to_network", body).status == 201


def test_a_firewall_is_in_use_while_a_server_is_behind_it(project: ProjectUnderTest) -> None:
    rules = [{"direction": "in", "protocol": "tcp", "port": "22", "source_ips": ["0.0.0.0/0"]}]
    firewall_id = _number(project.ask("POST", "/firewalls", {"name": "wall", "rules": rules}), "firewall")
    server_id = project.running(firewalls=[{"firewall": firewall_id}])
    assert project.ask("DELETE", f"/firewalls/{firewall_id}").code == "resource_in_use"
    shown = project.ask("GET", f"/servers/{server_id}").json["server"]["public_net"]["firewalls"]
    assert shown == [{"id": firewall_id, "status": "applied"}]
    target = {"type": "server", "server": {"id": server_id}}
    assert project.ask("POST", f"/firewalls/{firewall_id}/actions/set_rules", {"rules": []}).status == 201
    path = f"/firewalls/{firewall_id}/actions"
    assert project.ask("POST", f"{path}/remove_from_resources", {"remove_from": [target]}).status == 201
    by_label = {"type": "label_selector", "label_selector": {"selector": "a=b"}}
    assert project.ask("POST", f"{path}/apply_to_resources", {"apply_to": [by_label]}).status == 201
    assert project.ask("GET", f"/firewalls/{firewall_id}").json["firewall"]["applied_to"][0]["type"] == "label_selector"
    assert project.ask("POST", f"{path}/remove_from_resources", {"remove_from": [by_label]}).status == 201
    assert project.ask("DELETE", f"/firewalls/{firewall_id}").status == 204


def test_with_an_ssh_key_there_is_no_password(project: ProjectUnderTest) -> None:
    made = project.ask("POST", "/ssh_keys", {"name": "me", "public_key": KEY})
    assert project.ask("POST", "/ssh_keys", {"name": "you", "public_key": KEY}).code == "uniqueness_error"
    assert len(made.json["ssh_key"]["fingerprint"].split(":")) == 16
    answered = project.ask("POST", "/servers", {**ORDER, "ssh_keys": ["me"]})
    assert answered.json["root_password"] is None
    assert project.ask("DELETE", f"/ssh_keys/{_number(made, 'ssh_key')}").status == 204


def test_every_list_and_resource_answers_as_published() -> None:
    """A walk over every GET that is routed, with something there to be shown."""
    project = ProjectUnderTest(Contract.find())
    subnets = [{"type": "cloud", "network_zone": "eu-central"}]
    network = _number(
        project.ask("POST", "/networks", {"name": "n", "ip_range": "10.0.0.0/16", "subnets": subnets}), "network"
    )
    rules = [{"direction": "in", "protocol": "icmp", "source_ips": ["::/0"]}]
    firewall = _number(project.ask("POST", "/firewalls", {"name": "f", "rules": rules}), "firewall")
    ids = {
        "servers": project.running(networks=[network], firewalls=[{"firewall": firewall}]),
        "networks": network,
        "firewalls": firewall,
        "ssh_keys": _number(project.ask("POST", "/ssh_keys", {"name": "k", "public_key": KEY}), "ssh_key"),
        "primary_ips": project.ask("GET", "/primary_ips").json["primary_ips"][0]["id"],
        "server_types": 114,
        "locations": 2,
        "datacenters": 2,
        "images": 161547269,
    }
    last_action = next(reversed(project.emulator.project.actions))
    walked = 0
    for place, endpoints in _ROUTES.items():
        if "GET" in endpoints:
            root = place.split("/")[2]
            path = place.removeprefix("/v1").replace("actions/N", f"actions/{last_action}")
            answered = project.ask(
                "GET", path.replace("N", str(ids.get(root, 1))) + ("?id=1" if path == "/actions" else "")
            )
            assert answered.status == (404 if root not in ids and "N" in path else 200), path
            walked += 1
    assert walked > 45


def test_prices_are_decimal_strings_per_location(project: ProjectUnderTest) -> None:
    (kind,) = project.ask("GET", "/server_types?name=cx23").json["server_types"]
    by_place = {each["location"]: each for each in kind["prices"]}
    assert set(by_place) == {"fsn1", "nbg1", "hel1"}
    assert by_place["nbg1"]["price_hourly"] == {"net": "0.0056000000", "gross": "0.0066640000000000"}
    pricing = project.ask("GET", "/pricing").json["pricing"]
    assert pricing["currency"] == "EUR"
    assert pricing["primary_ips"][0]["prices"][0]["price_monthly"]["net"] == "0.5000000000"


def test_the_clients_token_and_user_data_are_nowhere_to_be_read(project: ProjectUnderTest) -> None:
    server_id = project.running(user_data="#cloud-config\n# secret-join-token\n")
    shown = json.dumps(project.ask("GET", f"/servers/{server_id}").json)
    control = project.emulator.handle("GET", "/_emulator/machines", [], {}, b"").body.decode()
    assert "secret-join-token" not in shown + control
