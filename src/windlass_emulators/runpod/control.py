"""/_emulator: what a real cloud has no endpoint for. Faults, the bill, what runs inside the pods.

- `GET /_emulator/ledger`: the bill by now.
- `GET /_emulator/clock`: the emulator's time.
- `GET /_emulator/machines`: which pods there are, and whether a program runs in them.
- `POST /_emulator/machines/ID/crash`: what runs inside is gone, and the API does not know.
- `POST /_emulator/machines/ID/lose-gpus`: its GPUs are gone while it runs.
- `POST /_emulator/volumes/ID/fill` with `{"used_gb": 95}`: what its pods measure.
- `GET /_emulator/faults`, `DELETE /_emulator/faults`: what is scripted; nothing is.
- `POST /_emulator/faults` with `{"fault": "next_create", "status": 500, "takes_effect": true}`: a method of Faults.
"""

import json
import re
from typing import TYPE_CHECKING

from windlass_emulators.fault_script import call_by_name
from windlass_emulators.http import Json, Response, json_response
from windlass_emulators.runpod.faults import METHODS

if TYPE_CHECKING:
    from windlass_emulators.runpod.emulator import RunpodEmulator

CONTROL = "/_emulator/"


def control(emulator: "RunpodEmulator", method: str, path: str, body: bytes) -> Response:
    request = f"{method} /{path.removeprefix(CONTROL)}"
    if request == "GET /ledger":
        return json_response(200, emulator.bill())
    if request == "GET /clock":
        return json_response(200, {"now": emulator.account.now.isoformat()})
    if request == "GET /machines":
        return json_response(200, {"machines": _machines(emulator)})
    if match := re.fullmatch(r"POST /machines/([^/]+)/(crash|lose-gpus)", request):
        if match[1] not in emulator.account.pods:
            return _refused(404, f"there is no pod {match[1]}")
        {"crash": emulator.crash, "lose-gpus": emulator.lose_gpus}[match[2]](match[1])
        return json_response(200, {"machines": _machines(emulator)})
    if match := re.fullmatch(r"POST /volumes/([^/]+)/fill", request):
        return _fill(emulator, match[1], body)
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


def _machines(emulator: "RunpodEmulator") -> list[Json]:
    return [
        {"pod_id": pod.id, "name": pod.name, "status": pod.status, "is_running": emulator.host.is_running(pod.id)}
        for pod in emulator.account.pods.values()
    ]


def _fill(emulator: "RunpodEmulator", volume_id: str, body: bytes) -> Response:
    if volume_id not in emulator.account.volumes:
        return _refused(404, f"there is no network volume {volume_id}")
    try:
        used_gb = float(json.loads(body)["used_gb"])
    except (ValueError, TypeError, KeyError):
        return _refused(422, 'say how much, as in {"used_gb": 95}')
    emulator.fill_volume(volume_id, used_gb)
    return json_response(200, {"id": volume_id, "used_gb": used_gb})


def _refused(status: int, message: str) -> Response:
    return json_response(status, {"error": message})
