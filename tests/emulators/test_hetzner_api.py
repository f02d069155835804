"""The emulated Hetzner API: published schemas, error codes and timing."""

import json
from typing import Any

import pytest

from support.emulated_project import HEADERS, ORDER, ProjectUnderTest
from support.hetzner_contract import Contract
from windlass_emulators.hetzner import HetznerEmulatorSettings
from windlass_emulators.hetzner.emulator import ROUTES
from windlass_emulators.hetzner.selectors import parse_selector

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJtQ2uSg6nTn3fWbWQWQ4mYv2n0b3PTZ8aB1G0u0JqLk someone@somewhere"


def _id(answer: Any, root: str) -> int:
    return int(answer.json[root]["id"])


# ---------------------------------------------------------------------------------------------------------- lifecycle


def test_server_boots_through_the_published_states(project: ProjectUnderTest) -> None:
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


def test_creation_returns_actions_that_progress(project: ProjectUnderTest) -> None:
    made = project.request("POST", "/servers", ORDER).json
    assert (made["action"]["command"], made["action"]["status"], made["action"]["progress"]) == (
        "create_server",
        "running",
        0,
    )
    assert [each["command"] for each in made["next_actions"]] == ["start_server"]
    project.clock.advance(4)
    started = project.request("GET", f"/actions/{made['next_actions'][0]['id']}").json["action"]
    assert (started["status"], started["progress"], started["finished"]) == ("running", 50, None)
    project.clock.advance(4)
    listed = project.request("GET", f"/actions?id={made['action']['id']}&id={made['next_actions'][0]['id']}").json
    assert set(listed) == {"actions"}, "the document has no pages here"
    by_id = listed["actions"]
    assert [(each["status"], each["progress"]) for each in by_id] == [("success", 100)] * 2
    assert by_id[1]["finished"] == "2030-01-01T00:00:08Z"


def test_server_created_without_start_is_off(project: ProjectUnderTest) -> None:
    server = project.create(start_after_create=False)
    project.settle_all()
    assert project.status(server["id"]) == "off"
    assert not project.host.is_running(server["id"])


def test_running_action_locks_the_server(project: ProjectUnderTest) -> None:
    server = project.create()
    assert project.request("GET", f"/servers/{server['id']}").json["server"]["locked"]
    answer = project.request("DELETE", f"/servers/{server['id']}")
    assert (answer.status, answer.code) == (423, "locked")
    project.clock.advance(8)
    assert project.request("DELETE", f"/servers/{server['id']}").status == 200


def test_deleted_server_is_deleting_then_not_found(project: ProjectUnderTest) -> None:
    server_id = project.running()
    assert project.request("DELETE", f"/servers/{server_id}").json["action"]["command"] == "delete_server"
    assert (project.status(server_id), project.host.running) == ("deleting", {})
    assert project.request("DELETE", f"/servers/{server_id}").code == "locked"
    project.clock.advance(1)
    assert project.request("GET", f"/servers/{server_id}").code == "not_found"
    assert project.request("DELETE", f"/servers/{server_id}").status == 404
    assert project.listed() == project.listed("/primary_ips") == []
    assert (
        project.request("GET", f"/servers/{server_id}/actions?sort=id:desc").json["actions"][0]["status"] == "success"
    )


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
def test_power_action_changes_status_and_process(
    project: ProjectUnderTest,
    action: str,
    at_once: str,
    is_running_at_once: bool,
    later: str,
    is_running_later: bool,
) -> None:
    server_id = project.running()
    assert project.request("POST", f"/servers/{server_id}/actions/{action}").status == 201
    assert (project.status(server_id), project.host.is_running(server_id)) == (at_once, is_running_at_once)
    project.settle_all()
    assert (project.status(server_id), project.host.is_running(server_id)) == (later, is_running_later)


def test_server_powered_on_again_keeps_its_disk(project: ProjectUnderTest) -> None:
    server_id = project.running(user_data="#cloud-config\n")
    project.request("POST", f"/servers/{server_id}/actions/poweroff")
    project.settle_all()
    project.request("POST", f"/servers/{server_id}/actions/poweron")
    assert project.status(server_id) == "starting"
    project.settle_all()
    assert project.host.running[server_id].user_data == "#cloud-config\n"


def test_server_name_and_labels_can_be_updated(project: ProjectUnderTest) -> None:
    server_id = project.running(labels={"a": "1"})
    project.request("PUT", f"/servers/{server_id}", {"labels": {"b": "2"}})
    changed = project.request("PUT", f"/servers/{server_id}", {"name": "other"}).json["server"]
    assert (changed["name"], changed["labels"]) == ("other", {"b": "2"})
    project.running(name="second")
    assert project.request("PUT", f"/servers/{server_id}", {"name": "second"}).code == "uniqueness_error"


# ------------------------------------------------------------------------------------------------------ refusals

_LONG = "x" * 64


@pytest.mark.parametrize(
    ("order", "field"),
    [
        pytest.param({"name": "worker_1"}, "name", id="a name with an underscore"),
        pytest.param({"name": "-worker"}, "name", id="a name that starts with a dash"),
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
        pytest.param({"user_data": "ä" * 16385}, "user_data", id="user_data is measured in bytes"),
        pytest.param({"networks": [1]}, "networks", id="an unknown network"),
        pytest.param({"ssh_keys": ["unknown"]}, "ssh_keys", id="an unknown key"),
        pytest.param({"firewalls": [{"firewall": 1}]}, "firewalls", id="an unknown firewall"),
        pytest.param(
            {"public_net": {"enable_ipv4": False, "enable_ipv6": False}}, "public_net", id="no network interface"
        ),
        pytest.param({"start_after_create": "yes"}, "start_after_create", id="a flag is not a string"),
        pytest.param({"networks": ["a"]}, "networks", id="a network id is a number"),
        pytest.param({"public_net": {"ipv4": "a"}}, "public_net.ipv4", id="an address id is a number"),
        pytest.param({"server_type": {}}, "server_type", id="a type is a name or an id"),
        pytest.param({"placement_group": 1}, "placement_group", id="placement groups are not emulated"),
    ],
)
def test_invalid_input_names_the_field(project: ProjectUnderTest, order: dict[str, Any], field: str) -> None:
    answer = project.request("POST", "/servers", {**ORDER, **order})
    assert (answer.status, answer.code) == (422, "invalid_input")
    assert [each["name"] for each in answer.json["error"]["details"]["fields"]] == [field]
    assert project.listed() == project.listed("/primary_ips") == []


def test_all_invalid_fields_are_reported_together(project: ProjectUnderTest) -> None:
    fields = project.request("POST", "/servers", {}).json["error"]["details"]["fields"]
    assert {each["name"] for each in fields} == {"name", "server_type", "image"}


@pytest.mark.parametrize(
    ("order", "status", "code", "message"),
    [
        ({"server_type": "cx22"}, 422, "invalid_input", "deprecated"),
        ({"location": "ash"}, 422, "invalid_input", "unsupported location for server type"),
        ({"name": "taken"}, 409, "uniqueness_error", "name is already used"),
    ],
)
def test_unavailable_order_is_refused(
    project: ProjectUnderTest, order: dict[str, Any], status: int, code: str, message: str
) -> None:
    project.create(name="taken")
    answer = project.request("POST", "/servers", {**ORDER, **order})
    assert (answer.status, answer.code) == (status, code)
    assert message in answer.json["error"]["message"]


def test_retired_type_is_marked_in_the_catalog(project: ProjectUnderTest) -> None:
    (found,) = project.request("GET", "/server_types?name=cx22").json["server_types"]
    assert found["deprecated"] and found["locations"][0]["deprecation"]["unavailable_after"] < "2026-02"
    assert not any(place["available"] for place in found["locations"])


def test_project_enforces_its_server_limit() -> None:
    project = ProjectUnderTest(Contract.find_or_none(), HetznerEmulatorSettings(server_limit=1))
    project.create()
    answer = project.request("POST", "/servers", {**ORDER, "name": "worker-2"})
    assert (answer.status, answer.code) == (403, "resource_limit_exceeded")
    assert answer.json["error"]["details"] == {"limits": [{"name": "server_limit"}]}


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "code"),
    [
        pytest.param("GET", "/servers", None, {"Host": "x"}, "unauthorized", id="without a token"),
        pytest.param("GET", "/servers", None, {"Authorization": "Bearer  "}, "unauthorized", id="an empty token"),
        pytest.param("GET", "/servers/1", None, HEADERS, "not_found", id="no such server"),
        pytest.param("POST", "/servers", b"{", HEADERS, "json_error", id="malformed JSON"),
        pytest.param("POST", "/servers", b"[]", HEADERS, "json_error", id="a JSON array"),
        pytest.param("GET", "/actions", None, HEADERS, "deprecated_api_endpoint", id="all actions"),
        pytest.param("GET", "/servers?page=0", None, HEADERS, "invalid_input", id="page zero"),
        pytest.param("GET", "/servers?sort=colour", None, HEADERS, "invalid_input", id="an unknown sort key"),
        pytest.param("GET", "/servers?label_selector=a+b", None, HEADERS, "invalid_input", id="a bad selector"),
        pytest.param("POST", "/volumes", {"size": 10}, HEADERS, "unsupported_error", id="create a volume"),
        pytest.param("GET", "/volumes", None, HEADERS, "unsupported_error", id="list volumes"),
        pytest.param("GET", "/volumes/1", None, HEADERS, "unsupported_error", id="read a volume"),
        pytest.param(
            "POST", "/servers/1/actions/enable_rescue", {}, HEADERS, "unsupported_error", id="rescue a server"
        ),
        pytest.param("DELETE", "/networks/1", None, HEADERS, "unsupported_error", id="delete a network"),
        pytest.param("GET", "/datacenters", None, HEADERS, "deprecated_api_endpoint", id="list datacenters"),
    ],
)
def test_request_is_refused_with_published_code(
    project: ProjectUnderTest, method: str, path: str, body: Any, headers: dict[str, str], code: str
) -> None:
    assert project.request(method, path, body, headers).code == code


def test_unknown_path_and_method_are_refused() -> None:
    project = ProjectUnderTest(None)
    assert project.request("GET", "/nothing").code == "not_found"
    assert project.request("GET", "/servers/1/metrics").code == "unsupported_error"
    assert project.request("PUT", "/servers").code == "method_not_allowed"


def test_configured_token_is_required_everywhere() -> None:
    project = ProjectUnderTest(Contract.find_or_none(), HetznerEmulatorSettings(token="right"))
    assert project.request("GET", "/servers").code == "unauthorized"
    assert project.request("GET", "/servers", headers={"Authorization": "Bearer right"}).status == 200
    for token, status in (("right", 200), ("wrong", 401)):
        headers = {"Authorization": f"Bearer {token}"}
        assert project.emulator.handle("GET", "/_emulator/ledger", (), headers, b"").status == status
    assert project.emulator.handle("GET", "/_emulator/ledger", (), {}, b"").status == 401


def test_contract_rejects_unpublished_parameters() -> None:
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
def test_label_selector_selects_published_matches(selector: str, chosen: str) -> None:
    labels: dict[str, dict[str, str]] = {
        "a": {"env": "prod"},
        "b": {"env": "test", "tier": "1"},
        "c": {"env": ""},
        "d": {"example.com/kind": "x"},
    }
    selects = parse_selector(selector)
    assert "".join(name for name, own in labels.items() if selects(own)) == chosen


def test_lists_are_paginated_with_links(project: ProjectUnderTest) -> None:
    for number in range(60):
        project.create(name=f"worker-{number:02}", labels={"half": str(number % 2)})
    first = project.request("GET", "/servers?per_page=50&label_selector=half")
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
    assert len(project.request("GET", "/servers?per_page=50&page=2").json["servers"]) == 10
    assert len(project.request("GET", "/servers").json["servers"]) == 25
    assert len(project.request("GET", "/servers?per_page=500").json["servers"]) == 50
    assert project.request("GET", "/servers?page=9").json["servers"] == []
    assert len(project.sdk.servers.get_all(label_selector="half=1")) == 30


def test_lists_are_filtered_and_sorted(project: ProjectUnderTest) -> None:
    project.running(name="b")
    project.create(name="a")
    assert project.listed("/servers?name=a") == ["a"]
    assert project.listed("/servers?status=running") == ["b"]
    assert project.listed("/servers?status=running&status=initializing&sort=name") == ["a", "b"]
    assert project.listed("/servers?sort=created:desc") == ["a", "b"]
    assert project.listed("/images?name=ubuntu-24.04&architecture=arm") == ["ubuntu-24.04"]


def test_rate_limit_refills_one_request_per_second(project: ProjectUnderTest) -> None:
    headers = project.request("GET", "/locations").headers
    assert (headers["RateLimit-Limit"], headers["RateLimit-Remaining"]) == ("3600", "3599")
    assert int(headers["RateLimit-Reset"]) == int(project.clock.now.timestamp()) + 1
    for _ in range(3599):
        project.emulator.handle("GET", "/v1/locations", [], HEADERS, b"")
    answer = project.request("GET", "/locations")
    assert (answer.status, answer.code) == (429, "rate_limit_exceeded")
    assert answer.headers["RateLimit-Remaining"] == "0"
    assert int(answer.headers["RateLimit-Reset"]) == int(project.clock.now.timestamp()) + 3600
    project.clock.advance(2)
    assert [project.request("GET", "/locations").status for _ in range(3)] == [200, 200, 429]


# ------------------------------------------------------------------------------------------------- resources


def test_primary_ip_of_deleted_server_can_be_kept_and_deleted(project: ProjectUnderTest) -> None:
    server_id = project.running(public_net={"enable_ipv6": False})
    ip_id = project.request("GET", "/primary_ips").json["primary_ips"][0]["id"]
    assert project.request("GET", f"/primary_ips/{ip_id}").json["primary_ip"]["assignee_id"] == server_id
    change = {"auto_delete": False, "name": "mine", "labels": {"a": "b"}}
    assert project.request("PUT", f"/primary_ips/{ip_id}", change).json["primary_ip"]["auto_delete"] is False
    assert project.request("DELETE", f"/primary_ips/{ip_id}").code == "must_be_unassigned"
    project.request("DELETE", f"/servers/{server_id}")
    project.settle_all()
    assert project.listed("/primary_ips?label_selector=a=b") == ["mine"]
    assert project.request("DELETE", f"/primary_ips/{ip_id}").status == 204
    assert project.listed("/primary_ips") == []


def test_server_gets_an_address_in_its_network(project: ProjectUnderTest) -> None:
    network_id = project.network()
    private = {"networks": [network_id], "public_net": {"enable_ipv4": False, "enable_ipv6": False}}
    nets = [project.create(name=f"worker-{i}", **private)["private_net"][0]["ip"] for i in range(2)]
    assert nets == ["10.0.1.2", "10.0.1.3"]
    assert len(project.request("GET", f"/networks/{network_id}").json["network"]["servers"]) == 2
    assert project.listed("/primary_ips") == []
    other_zone = {"name": "overseas", "server_type": "cpx11", "location": "ash", "networks": [network_id]}
    assert project.request("POST", "/servers", {**ORDER, **other_zone}).code == "no_subnet_available"
    assert len(project.listed()) == 2


def test_server_shows_its_firewall(project: ProjectUnderTest) -> None:
    rules = [{"direction": "in", "protocol": "tcp", "port": "22", "source_ips": ["0.0.0.0/0"]}]
    firewall_id = _id(project.request("POST", "/firewalls", {"name": "wall", "rules": rules}), "firewall")
    server_id = project.running(firewalls=[{"firewall": firewall_id}])
    shown = project.request("GET", f"/servers/{server_id}").json["server"]["public_net"]["firewalls"]
    assert shown == [{"id": firewall_id, "status": "applied"}]
    firewall = project.request("GET", f"/firewalls/{firewall_id}").json["firewall"]
    assert firewall["applied_to"] == [{"type": "server", "server": {"id": server_id}}]
    assert firewall["rules"][0]["port"] == "22"


def test_server_with_ssh_key_has_no_root_password(project: ProjectUnderTest) -> None:
    made = project.request("POST", "/ssh_keys", {"name": "me", "public_key": KEY})
    assert project.request("POST", "/ssh_keys", {"name": "you", "public_key": KEY}).code == "uniqueness_error"
    assert project.request("POST", "/ssh_keys", {"name": "you", "public_key": "no key"}).code == "invalid_input"
    assert len(made.json["ssh_key"]["fingerprint"].split(":")) == 16
    answer = project.request("POST", "/servers", {**ORDER, "ssh_keys": ["me"]})
    assert answer.json["root_password"] is None


def test_every_get_route_answers_as_published() -> None:
    project = ProjectUnderTest(Contract.find())
    network = project.network()
    rules = [{"direction": "in", "protocol": "icmp", "source_ips": ["::/0"]}]
    firewall = _id(project.request("POST", "/firewalls", {"name": "f", "rules": rules}), "firewall")
    ids = {
        "servers": project.running(networks=[network], firewalls=[{"firewall": firewall}]),
        "networks": network,
        "firewalls": firewall,
        "ssh_keys": _id(project.request("POST", "/ssh_keys", {"name": "k", "public_key": KEY}), "ssh_key"),
        "primary_ips": project.request("GET", "/primary_ips").json["primary_ips"][0]["id"],
        "server_types": 114,
        "locations": 2,
        "images": 161547269,
    }
    action = next(reversed(project.emulator.project.actions))
    checked = 0
    for route in ROUTES:
        root = route.path.split("/")[2]
        if route.methods != {"GET"} or root == "datacenters" or route.path.endswith("/metrics"):
            continue
        path = route.path.removeprefix("/v1").replace("{action_id:int}", str(action))
        path = path.replace("{id:int}", str(ids.get(root, 0))) + ("?id=1" if path == "/actions" else "")
        assert project.request("GET", path).status == 200, path
        checked += 1
    assert checked >= 22


def test_prices_are_decimal_strings_per_location(project: ProjectUnderTest) -> None:
    (kind,) = project.request("GET", "/server_types?name=cx23").json["server_types"]
    by_place = {each["location"]: each for each in kind["prices"]}
    assert set(by_place) == {"fsn1", "nbg1", "hel1"}
    assert by_place["nbg1"]["price_hourly"] == {"net": "0.0056000000", "gross": "0.0066640000000000"}
    pricing = project.request("GET", "/pricing").json["pricing"]
    assert pricing["currency"] == "EUR"
    assert pricing["primary_ips"][0]["prices"][0]["price_monthly"]["net"] == "0.5000000000"


def test_user_data_is_never_shown(project: ProjectUnderTest) -> None:
    server_id = project.running(user_data="#cloud-config\n# secret-join-token\n")
    shown = json.dumps(project.request("GET", f"/servers/{server_id}").json)
    control = project.emulator.handle("GET", "/_emulator/machines", [], {}, b"").body.decode()
    assert "secret-join-token" not in shown + control
