"""/_emulator: what a real cloud has no endpoint for. Faults, the bill, what runs inside the machines.

- `GET /_emulator/ledger`: the bill by now.
- `GET /_emulator/clock`: the emulator's time, and how long a billed hour is.
- `GET /_emulator/machines`: which servers there are, and whether a program runs in them.
- `POST /_emulator/machines/ID/crash`: what runs inside is gone, and the API does not know.
- `GET /_emulator/faults`, `DELETE /_emulator/faults`: what is scripted; nothing is.
- `POST /_emulator/faults` with `{"fault": "next_create", "times_out_after_taking_effect": true}`: a method of Faults.
"""

import re
from typing import TYPE_CHECKING

from windlass_emulators.fault_script import call_by_name
from windlass_emulators.hetzner.faults import METHODS
from windlass_emulators.http import Json, Response, json_response

if TYPE_CHECKING:
    from windlass_emulators.hetzner.emulator import HetznerEmulator

CONTROL = "/_emulator/"


def control(emulator: "HetznerEmulator", method: str, path: str, body: bytes) -> Response:
    request = f"{method} /{path.removeprefix(CONTROL)}"
    if request == "GET /ledger":
        return json_response(200, emulator.bill())
    if request == "GET /clock":
        now, hour_s = emulator.project.now, emulator.settings.billing_hour_s
        return json_response(200, {"now": now.isoformat(), "billing_hour_s": hour_s})
    if request == "GET /machines":
        return json_response(200, {"machines": _machines(emulator)})
    if match := re.fullmatch(r"POST /machines/(\d+)/crash", request):
        if int(match[1]) not in emulator.project.servers:
            return _refused(404, f"there is no server {match[1]}")
        emulator.crash(int(match[1]))
        return json_response(200, {"machines": _machines(emulator)})
    if request == "DELETE /faults":
        emulator.faults.clear()
        request = "GET /faults"
    if request == "POST /faults":
        if problem := call_by_name(emulator.faults, METHODS, body):
            return _refused(422, problem)
        request = "GET /faults"
    if request == "GET /faults":
        return json_response(200, emulator.faults.to_json())
    return _refused(404, f"there is no {request}; see docs/emulators.md")


def _machines(emulator: "HetznerEmulator") -> list[Json]:
    return [
        {
            "server_id": server.id,
            "name": server.name,
            "status": server.status,
            "is_running": emulator.host.is_running(server.id),
        }
        for server in emulator.project.servers.values()
    ]


def _refused(status: int, message: str) -> Response:
    return json_response(status, {"error": message})
