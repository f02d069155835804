"""All settings, and the rules that they must satisfy. config_loader.py reads them from their sources."""

import re
import shlex
from email.utils import getaddresses
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationInfo, field_validator, model_validator

from windlass.model.adoption import AdoptionConfig, check_adoption_name
from windlass.model.comma_separated import TextList
from windlass.model.fleet import MIN_INTERVAL_S, FleetConfig, within_ten_years
from windlass.model.hetzner import HETZNER_ENDPOINT
from windlass.model.oidc import OidcConfig
from windlass.model.runpod import RUNPOD_ENDPOINT
from windlass.model.task import MAX_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES_LIMIT, is_name
from windlass.model.urls import problem_of_control_plane_url, problem_of_mail_server, problem_of_web_address
from windlass.model.worker import MAX_LEASE_S, MIN_LEASE_S

_DAY_S = 86_400.0
# A server can listen on these addresses, but a client cannot connect to them.
_ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104


class _Section(BaseModel):
    # An unknown key is most likely a typo, and an ignored typo can cost money.
    model_config = ConfigDict(frozen=True, extra="forbid")

    _durations = field_validator("*")(within_ten_years)


def _from_environment(name: str, description: str) -> Any:
    return Field(default=None, description=description, json_schema_extra={"env": name})


class Retention(_Section):
    """How long finished tasks and history are kept."""

    complete_s: float = Field(default=7 * _DAY_S, ge=0, description="Completed tasks.")
    failed_s: float = Field(default=30 * _DAY_S, ge=0, description="Failed tasks.")
    events_s: float = Field(default=30 * _DAY_S, ge=0, description="Events of tasks and workers.")
    cycles_s: float = Field(default=2 * _DAY_S, ge=0, description="Snapshots and plans of the control loop.")
    samples_s: float = Field(default=2 * _DAY_S, ge=0, description="Samples of fleets, for charts.")
    sample_averages_s: float = Field(
        default=30 * _DAY_S, ge=0, description="Averages of samples over five minutes, for charts of days."
    )
    logs_s: float = Field(
        default=3 * _DAY_S, ge=0, description="Log lines in the database, if `logs.in_database` is set."
    )
    charges_s: float = Field(default=400 * _DAY_S, ge=0, description="Charges: costs of workers and tasks.")
    history_s: float = Field(
        default=35 * _DAY_S,
        ge=0,
        description="Arrivals and durations of tasks, boots and prices of machines, for simulations.",
    )
    worker_logs_s: float = Field(default=7 * _DAY_S, ge=0, description="Output of workers and handlers.")
    worker_logs_mb: int = Field(
        default=1_024, ge=1, le=1_048_576, description="Output of all workers together. The oldest is deleted first."
    )
    worker_log_mb: int = Field(
        default=16, ge=1, le=1_024, description="Output of one worker. The oldest is deleted first."
    )


class WorkerConfig(_Section):
    """Defaults of `windlass worker`. Its options override them."""

    heartbeat_interval_s: float = Field(
        default=5.0, ge=MIN_INTERVAL_S, description="Interval between heartbeats, at least 0.05."
    )
    lease_s: float = Field(
        default=30.0,
        ge=MIN_LEASE_S,
        le=MAX_LEASE_S,
        description="Its tasks are requeued if no heartbeat arrives for this long, at most a day.",
    )
    timeout_s: float | None = Field(
        default=None, gt=0, description="Time limit of an attempt, for tasks without their own."
    )
    drain_timeout_s: float = Field(
        default=600.0, ge=0, description="A draining worker requeues tasks that still run after this time."
    )
    memory_limit_mb: int | None = Field(
        default=None,
        gt=0,
        description="Memory limit of one handler process. Default: 90 % of the machine's, divided by concurrency.",
    )

    @model_validator(mode="after")
    def _check_lease(self) -> "WorkerConfig":
        if self.lease_s < 3 * self.heartbeat_interval_s:
            raise ValueError(
                f"lease_s is {self.lease_s:g} and heartbeat_interval_s is {self.heartbeat_interval_s:g}: "
                "a lease must be at least three heartbeat intervals, or one lost packet costs a worker its tasks"
            )
        return self


# More processes than this would use up the connections of the database.
MAX_SERVER_PROCESSES = 64


class ControlConfig(_Section):
    """The control loop of `windlass up`."""

    lease_s: float = Field(
        default=30.0,
        gt=1,
        le=MAX_LEASE_S,
        description="A standby takes over if the leader does not renew its lease for this long, at most a day.",
    )


class ApiConfig(_Section):
    """The HTTP servers of `windlass up` and `windlass serve`: dashboard, API and remote workers."""

    host: str = Field(
        default="127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 for all interfaces."
    )
    port: int | None = Field(
        default=None, ge=0, le=65_535, description="Port to listen on; 0 for any free port. Default: no HTTP server."
    )
    url: str | None = Field(
        default=None,
        description="URL that remote workers call. Default: http or https, control_plane_ip (or host) and port.",
    )

    tls_cert: Path | None = Field(
        default=None, description="Certificate chain (PEM) for HTTPS. Loaded again when the file changes."
    )
    tls_key: Path | None = Field(default=None, description="Private key (PEM) of `tls_cert`, without a password.")
    plain_http: bool = Field(
        default=False,
        description="Allow HTTP without TLS beyond loopback, because a proxy or the network encrypts it.",
    )
    open_reading: bool = Field(
        default=False,
        description="Let every user of this host read without a login, until the first API token is created. A proxy "
        "on this host that adds no forwarding headers opens reading to all its callers: set `url` behind one.",
    )
    login_link: bool = Field(
        default=True,
        description="Print a login link for an operator when `up` starts in a terminal.",
    )
    processes: int | None = Field(
        default=None,
        ge=1,
        le=MAX_SERVER_PROCESSES,
        description="Server processes on this host. Default: one for every two cores, at least one.",
    )
    max_memory_mb: int = Field(
        default=1_024, ge=256, description="A server process that uses more memory is replaced without an outage."
    )
    rate_limit: float = Field(
        default=500.0,
        gt=0,
        description="Requests per second of one token, session or address. A worker may send 2,000.",
    )
    cors_origins: TextList = Field(
        default=(), description="Origins whose web pages may read the API with a token. Default: none."
    )

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: set both, or none of them")
        return self

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert is not None else "http"

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            scheme, _, host = origin.partition("://")
            if scheme not in ("http", "https") or not host or "/" in host or "*" in host:
                raise ValueError(f"{origin!r} is not an origin: write https://host or http://host:port, without a path")
        return origins

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        problem = problem_of_control_plane_url(url) if url is not None else None
        if problem is not None:
            raise ValueError(f"it {problem}")
        return url.rstrip("/") if url is not None else None


# Each has a thread of its own.
MAX_APPRISE_URLS = 10


class AlertsConfig(_Section):
    """Where alerts are sent. Each notifier gets one message when an alert fires and one when it resolves."""

    webhook_url: SecretStr | None = Field(default=None, description="URL that gets each message as JSON, by POST.")
    slack_url: SecretStr | None = Field(
        default=None,
        description="Incoming webhook of Slack, or of a compatible service (Mattermost, Discord with /slack).",
    )
    email_to: TextList = Field(default=(), description="Addresses that get each message by e-mail.")
    email_from: str = Field(default="windlass@localhost", description="Sender of those e-mails.")
    smtp_url: SecretStr | None = Field(
        default=None, description="Mail server: smtp://user:password@host:587, or smtps://."
    )
    command: str | None = Field(default=None, description="Command that gets each message as JSON on standard input.")
    apprise_urls: SecretStr | None = Field(
        default=None,
        description="Up to 10 Apprise URLs of other services, separated by spaces. Needs the extra windlass[apprise].",
    )
    failed_tasks_per_hour: int = Field(
        default=0, ge=0, description="An alert fires if more tasks of a queue fail within an hour."
    )
    ignored: TextList = Field(default=(), description="Codes of alerts that are not sent.")

    @field_validator("webhook_url", "slack_url", "smtp_url")
    @classmethod
    def _check_url(cls, url: SecretStr | None, field: ValidationInfo) -> SecretStr | None:
        if url is None:
            return None
        # A value that was read from a file often ends with a line break.
        address = url.get_secret_value().strip()
        problem_of = problem_of_mail_server if field.field_name == "smtp_url" else problem_of_web_address
        problem = problem_of(address)
        if problem is not None:
            raise ValueError(f"it {problem}")
        return SecretStr(address)

    @field_validator("apprise_urls")
    @classmethod
    def _check_apprise_urls(cls, urls: SecretStr | None) -> SecretStr | None:
        """Without Apprise, which `up` asks for details: a worker reads these settings too, and needs no extra."""
        if urls is None:
            return None
        found = urls.get_secret_value().split()
        if not 1 <= len(found) <= MAX_APPRISE_URLS:
            raise ValueError(f"write 1 to {MAX_APPRISE_URLS} URLs, separated by spaces")
        for position, url in enumerate(found, start=1):
            if not re.fullmatch(r"[a-zA-Z0-9]+://\S+", url):
                raise ValueError(f"number {position} is not a URL such as discord://id/token: separate URLs by spaces")
        return SecretStr(" ".join(found))

    @field_validator("email_to")
    @classmethod
    def _check_recipients(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        if not all(map(_is_mail_address, addresses)):
            raise ValueError("write each as ops@example.com")
        return addresses

    @field_validator("email_from")
    @classmethod
    def _check_sender(cls, address: str) -> str:
        if not _is_mail_address(address):
            raise ValueError("write it as windlass@example.com")
        return address

    @field_validator("command")
    @classmethod
    def _check_command(cls, command: str | None) -> str | None:
        if command is None:
            return None
        if "\0" in command:
            raise ValueError("it contains a NUL character")
        try:
            words = shlex.split(command)
        except ValueError:
            is_open = command.endswith("\\")
            raise ValueError("it ends in a backslash" if is_open else "a quote in it is not closed") from None
        if not words or not words[0]:
            raise ValueError("it has no program: write it as in a shell, /path/to/program --option")
        return command

    @model_validator(mode="after")
    def _check_mail_server(self) -> Self:
        if self.email_to and self.smtp_url is None:
            raise ValueError("email_to is set and smtp_url is not: set the mail server")
        return self


def _is_mail_address(text: str) -> bool:
    """With or without a name: Ops <ops@example.com>."""
    found = getaddresses([text])
    return text.isprintable() and len(found) == 1 and bool(re.fullmatch(r"[^@\s]+@[^@\s]+", found[0][1]))


class LogsConfig(_Section):
    """Log lines and traces of `windlass up`, and the output that workers send to the database."""

    in_database: bool = Field(
        default=False, description="Also store log lines in the table windlass.logs, for `retention.logs_s`."
    )
    traces_endpoint: str | None = Field(
        default=None,
        description="OTLP endpoint (HTTP) for traces of cycles and tasks. Needs the extra windlass[otel].",
    )

    send_output: bool = Field(
        default=True, description="Workers send what they and their handlers print, for `windlass workers logs`."
    )
    output_bytes_per_s: int = Field(
        default=32_768,
        ge=1_024,
        le=1_048_576,
        description="Output that one worker sends per second. Lines above it are dropped and counted.",
    )
    output_bytes_per_attempt: int = Field(
        default=1_048_576,
        ge=1_024,
        le=16_777_216,
        description="Output of one attempt that is sent while it runs. The last lines of the rest are sent, too.",
    )

    @field_validator("traces_endpoint")
    @classmethod
    def _check_url(cls, endpoint: str | None) -> str | None:
        problem = problem_of_web_address(endpoint) if endpoint is not None else None
        if problem is not None:
            raise ValueError(f"it {problem}")
        return endpoint


class Config(_Section):
    database_url: SecretStr | None = Field(
        default=None,
        description="PostgreSQL 14 or newer. Default: an embedded PostgreSQL in `data_dir`.",
        json_schema_extra={"env": "DATABASE_URL"},
    )
    data_dir: Path | None = Field(
        default=None, description="Folder of the embedded PostgreSQL. Default: the user's data directory."
    )
    supabase_url: str | None = _from_environment(
        "SUPABASE_URL", "URL of a Supabase project. Needs database_url too: windlass connects to the database itself."
    )
    supabase_service_role_key: SecretStr | None = _from_environment(
        "SUPABASE_SERVICE_ROLE_KEY", "Not used, but accepted; masked in logs, and not passed to workers."
    )
    runpod_api_key: SecretStr | None = _from_environment("RUNPOD_API_KEY", "API key for Runpod fleets.")
    runpod_endpoint: str = Field(
        default=RUNPOD_ENDPOINT,
        description="URL of the Runpod API, or of an emulator.",
        json_schema_extra={"env": "RUNPOD_ENDPOINT"},
    )
    runpod_ssh_key_file: Path | None = _from_environment(
        "RUNPOD_SSH_PRIVATE_KEY_PATH", "Private SSH key for pods, for Runpod fleets with `auto_start_worker`."
    )
    hetzner_api_token: SecretStr | None = _from_environment(
        "HCLOUD_TOKEN HETZNER_API_TOKEN", "API token for Hetzner fleets."
    )
    hetzner_endpoint: str = Field(
        default=HETZNER_ENDPOINT,
        description="URL of the Hetzner Cloud API, or of an emulator.",
        json_schema_extra={"env": "HCLOUD_ENDPOINT"},
    )
    hetzner_network_id: int | None = _from_environment("HETZNER_NETWORK_ID", "Private network of Hetzner fleets.")
    ray_address: str | None = _from_environment(
        "RAY_ADDRESS", "Head of a Ray cluster, as host:port. Default: `up` starts one if a fleet needs it."
    )
    control_plane_ip: str | None = _from_environment(
        "RGRID_CONTROL_PLANE_IP", "Address of the control plane in a private network, for remote workers."
    )
    max_payload_bytes: int = Field(
        default=MAX_PAYLOAD_BYTES,
        gt=0,
        le=MAX_PAYLOAD_BYTES_LIMIT,
        description="Maximum size of a payload or result, as JSON. At most 64 MiB.",
    )
    retention: Retention = Retention()
    worker: WorkerConfig = WorkerConfig()
    control: ControlConfig = ControlConfig()
    api: ApiConfig = ApiConfig()
    oidc: OidcConfig = OidcConfig()
    alerts: AlertsConfig = AlertsConfig()
    logs: LogsConfig = LogsConfig()
    fleets: dict[str, FleetConfig] = Field(default_factory=dict, description="One table per fleet.")
    adopt: dict[str, AdoptionConfig] = Field(default_factory=dict, description="One table per adopted table.")

    @field_validator("hetzner_api_token", "runpod_api_key")
    @classmethod
    def _check_key(cls, key: SecretStr | None) -> SecretStr | None:
        """Strip line breaks, which files often end with. HTTP libraries would quote the key in an error message."""
        if key is None:
            return None
        bare = key.get_secret_value().strip()
        if not re.fullmatch(r"[!-~]+", bare):
            raise ValueError("it must be one word of printable ASCII characters, as the vendor's console shows it")
        return SecretStr(bare)

    @field_validator("hetzner_endpoint", "runpod_endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str, field: ValidationInfo) -> str:
        usual = HETZNER_ENDPOINT if field.field_name == "hetzner_endpoint" else RUNPOD_ENDPOINT
        if not endpoint.startswith(("https://", "http://")):
            raise ValueError("it must be a URL that begins with https://, such as " + usual)
        endpoint = endpoint.rstrip("/")
        # Other versions of the API would respond with 404 to every request.
        version = usual[usual.rindex("/") :]
        if not endpoint.endswith(version):
            raise ValueError(f"it must end in {version}, as {usual} does")
        return endpoint

    @field_validator("ray_address")
    @classmethod
    def _check_ray_address(cls, address: str | None) -> str | None:
        if address is not None and not re.fullmatch(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}", address):
            hint = "; Ray Client (ray://) is not supported" if address.startswith("ray://") else ""
            raise ValueError(f"it must be host:port of the head, for example 10.0.0.5:6379{hint}")
        return address

    @field_validator("fleets")
    @classmethod
    def _check_fleet_names(cls, fleets: dict[str, FleetConfig]) -> dict[str, FleetConfig]:
        for name in fleets:
            if not is_name(name):
                raise ValueError(f"invalid fleet name {name!r}: use at most 63 letters, digits and _ . : -")
        return fleets

    @field_validator("adopt")
    @classmethod
    def _check_adoption_names(cls, adoptions: dict[str, AdoptionConfig]) -> dict[str, AdoptionConfig]:
        for name in adoptions:
            check_adoption_name(name)
        return adoptions

    @model_validator(mode="after")
    def _check_supabase(self) -> Self:
        if self.supabase_url is not None and self.database_url is None and self.data_dir is None:
            raise ValueError(
                f"supabase_url is {self.supabase_url}, but database_url is not set: set DATABASE_URL to the connection "
                "string that the Supabase dashboard shows under Connect"
            )
        return self

    @property
    def machine_url(self) -> str | None:
        """The URL of the control plane for remote workers; None if it is unknown."""
        if self.api.url is not None:
            return self.api.url
        host = self.control_plane_ip or self.api.host
        if not self.api.port or host in _ANY_ADDRESS:
            return None
        address = f"[{host}]:{self.api.port}" if ":" in host else f"{host}:{self.api.port}"
        return f"{self.api.scheme}://{address}"
