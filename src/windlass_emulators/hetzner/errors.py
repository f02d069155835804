"""Errors with the codes, statuses and details that Hetzner publishes."""

from collections.abc import Iterable, Mapping

from windlass_emulators.http import Json, Response, VendorApiError, json_response

# The published codes, and those of the gateway in front of the API.
STATUS_OF_CODE: Mapping[str, int] = {
    "json_error": 400,
    "unauthorized": 401,
    "token_readonly": 401,
    "forbidden": 403,
    "maintenance": 403,
    "resource_limit_exceeded": 403,
    "not_found": 404,
    "method_not_allowed": 405,
    "uniqueness_error": 409,
    "conflict": 409,
    "deprecated_api_endpoint": 410,
    "resource_unavailable": 412,
    "primary_ip_version_mismatch": 412,
    "invalid_input": 422,
    "service_error": 422,
    "unsupported_error": 422,
    "placement_error": 422,
    "primary_ip_assigned": 422,
    "primary_ip_already_assigned": 422,
    "primary_ip_datacenter_mismatch": 422,
    "must_be_unassigned": 422,
    "server_not_stopped": 422,
    "server_has_ipv4": 422,
    "server_has_ipv6": 422,
    "server_already_attached": 422,
    "ip_not_available": 422,
    "no_subnet_available": 422,
    "networks_overlap": 422,
    "resource_in_use": 422,
    "locked": 423,
    "protected": 423,
    "rate_limit_exceeded": 429,
    "server_error": 500,
    "bad_gateway": 502,
    "unavailable": 503,
    "timeout": 504,
}


class HetznerApiError(VendorApiError):
    def __init__(self, code: str, message: str, details: Json | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details
        self.status = status or STATUS_OF_CODE[code]

    def response(self) -> Response:
        error = {"code": self.code, "message": self.message, "details": self.details}
        return json_response(self.status, {"error": error})


def not_found(what: str, identity: object) -> HetznerApiError:
    return HetznerApiError("not_found", f"{what} with ID '{identity}' not found", {})


def invalid(problems: Iterable[tuple[str, str]]) -> HetznerApiError:
    """From pairs (field, violation)."""
    by_field: dict[str, list[str]] = {}
    for field, message in problems:
        by_field.setdefault(field, []).append(message)
    field, messages = next(iter(by_field.items()))
    fields = [{"name": name, "messages": texts} for name, texts in by_field.items()]
    return HetznerApiError("invalid_input", f"invalid input in field '{field}': {messages[0]}", {"fields": fields})


def not_unique(what: str, field: str = "name") -> HetznerApiError:
    return HetznerApiError("uniqueness_error", f"{what} {field} is already used", {"fields": [{"name": field}]})


def unsupported(what: str) -> HetznerApiError:
    return HetznerApiError("unsupported_error", f"the emulator does not support {what}", {})
