"""Everything that can be set, validated in one place.

Where values come from (file, environment, command line) is no concern of this module: see config_loader.py.
"""

import re
import shlex
from email.utils import getaddresses
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationInfo, field_validator, model_validator

from windlass.model.fleet import MIN_INTERVAL_S, FleetConfig, within_ten_years
from windlass.model.hetzner import HETZNER_ENDPOINT
from windlass.model.runpod import RUNPOD_ENDPOINT
from windlass.model.task import MAX_PAYLOAD_BYTES, is_name
from windlass.model.urls import problem_of_control_plane_url, problem_of_mail_server, problem_of_web_address

_DAY_S = 86_400.0
# Good to listen on, but no place to call.
_ANYWHERE = ("0.0.0.0", "::")  # noqa: S104


class _Section(BaseModel):
    # An unknown key is a typo, and a typo that is ignored costs money.
    model_config = ConfigDict(frozen=True, extra="forbid")

    _durations = field_validator("*")(within_ten_years)


def _from_environment(name: str, description: str) -> Any:
    return Field(default=None, description=description, json_schema_extra={"env": name})


class Retention(_Section):
    """How long finished things are kept."""

    complete_s: float = Field(default=7 * _DAY_S, ge=0, description="Completed tasks.")
    failed_s: float = Field(default=30 * _DAY_S, ge=0, description="Dead letters.")
    events_s: float = Field(default=30 * _DAY_S, ge=0, description="Events: the story of each task and worker.")
    cycles_s: float = Field(default=2 * _DAY_S, ge=0, description="Snapshots and plans of the control loop.")
    samples_s: float = Field(default=2 * _DAY_S, ge=0, description="How fleets stood, for charts.")
    logs_s: float = Field(
        default=3 * _DAY_S, ge=0, description="Log lines in the database, where `logs.in_database` is set."
    )
    charges_s: float = Field(default=400 * _DAY_S, ge=0, description="What was paid, and what for.")


class WorkerConfig(_Section):
    """How workers behave that are not told otherwise on their command line."""

    heartbeat_interval_s: float = Field(
        default=5.0, ge=MIN_INTERVAL_S, description="How often a worker says that it lives; 0.05 at the least."
    )
    lease_s: float = Field(default=30.0, gt=0, description="Silent for longer than this, its tasks go to others.")
    timeout_s: float | None = Field(default=None, gt=0, description="Time limit of tasks that bring none of their own.")
    drain_timeout_s: float = Field(
        default=600.0, ge=0, description="From the wish to end until tasks at hand are given back."
    )
    memory_limit_mb: int | None = Field(
        default=None,
        gt=0,
        description="Memory one handler's process may use. Without it: nine tenths of the machine's, by concurrency.",
    )

    @model_validator(mode="after")
    def _several_beats_fit_into_the_lease(self) -> "WorkerConfig":
        if self.lease_s < 3 * self.heartbeat_interval_s:
            raise ValueError(
                f"lease_s is {self.lease_s:g} and heartbeat_interval_s is {self.heartbeat_interval_s:g}: "
                "at least three beats must fit into a lease, or one lost packet costs a worker its tasks"
            )
        return self


class ControlConfig(_Section):
    """The control loop itself."""

    lease_s: float = Field(
        default=30.0, gt=1, description="A leader that is silent for this long is replaced by another orchestrator."
    )


class ApiConfig(_Section):
    """The HTTP face of `windlass up`: for machines in a cloud, for programs, and for people."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Where to listen: 0.0.0.0 for everywhere.")
    port: int | None = Field(default=None, ge=0, le=65_535, description="Without it, nobody listens.")
    url: str | None = Field(
        default=None, description="Where machines call. Without it: http, control_plane_ip (or host) and the port."
    )

    rate_limit: float = Field(
        default=500.0, gt=0, description="Requests a second that one token, session or address may make; workers any."
    )
    cors_origins: tuple[str, ...] = Field(
        default=(), description="Web pages of these origins may read with a token. Without it: none."
    )

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _from_one_line(cls, origins: Any) -> Any:
        """The environment has only text: origins, separated by commas."""
        return [origin.strip() for origin in origins.split(",")] if isinstance(origins, str) else origins

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            scheme, _, host = origin.partition("://")
            if scheme not in ("http", "https") or not host or "/" in host or "*" in host:
                raise ValueError(f"{origin!r} is no origin: write https://host or http://host:port, without a path")
        return origins

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str | None) -> str | None:
        problem = problem_of_control_plane_url(url) if url is not None else None
        if problem is not None:
            raise ValueError(f"it {problem}")
        return url.rstrip("/") if url is not None else None


class AlertsConfig(_Section):
    """Who is told what is the matter. Everybody who is named is told everything, once, and when it is over."""

    webhook_url: SecretStr | None = Field(default=None, description="Gets each message as JSON, by POST.")
    slack_url: SecretStr | None = Field(
        default=None,
        description="An incoming webhook of Slack, or of what speaks like it (Mattermost, Discord's /slack).",
    )
    email_to: tuple[str, ...] = Field(default=(), description="Addresses that get each message as a mail.")
    email_from: str = Field(default="windlass@localhost", description="Who those mails are from.")
    smtp_url: SecretStr | None = Field(
        default=None, description="Through which server: smtp://user:password@host:587, or smtps://."
    )
    command: str | None = Field(
        default=None, description="A command that gets each message as JSON on its standard input."
    )
    dead_letters_per_hour: int = Field(
        default=0, ge=0, description="More dead letters of a queue within an hour than this are told."
    )
    ignored: tuple[str, ...] = Field(default=(), description="Codes of alerts that nobody wants to hear of.")

    @field_validator("email_to", "ignored", mode="before")
    @classmethod
    def _from_one_line(cls, names: Any) -> Any:
        """The environment has only text: names, separated by commas."""
        return [name.strip() for name in names.split(",")] if isinstance(names, str) else names

    @field_validator("webhook_url", "slack_url", "smtp_url")
    @classmethod
    def _is_an_address(cls, url: SecretStr | None, field: ValidationInfo) -> SecretStr | None:
        if url is None:
            return None
        # A value read from a file often ends with a line's end.
        address = url.get_secret_value().strip()
        problem_of = problem_of_mail_server if field.field_name == "smtp_url" else problem_of_web_address
        problem = problem_of(address)
        if problem is not None:
            raise ValueError(f"it {problem}")
        return SecretStr(address)

    @field_validator("email_to")
    @classmethod
    def _are_mail_addresses(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        if not all(map(_is_mail_address, addresses)):
            raise ValueError("write each as ops@example.com")
        return addresses

    @field_validator("email_from")
    @classmethod
    def _is_somebody(cls, address: str) -> str:
        if not _is_mail_address(address):
            raise ValueError("write it as windlass@example.com")
        return address

    @field_validator("command")
    @classmethod
    def _can_be_run(cls, command: str | None) -> str | None:
        if command is None:
            return None
        if "\0" in command:
            raise ValueError("it holds a NUL, which no command can")
        try:
            words = shlex.split(command)
        except ValueError:
            is_open = command.endswith("\\")
            raise ValueError("it ends in a backslash" if is_open else "a quote in it is not closed") from None
        if not words or not words[0]:
            raise ValueError("it names no program: write it as in a shell, /path/to/program --option")
        return command

    @model_validator(mode="after")
    def _mails_have_a_server(self) -> Self:
        if self.email_to and self.smtp_url is None:
            raise ValueError("email_to is set and smtp_url is not: name the server that takes the mails")
        return self


def _is_mail_address(text: str) -> bool:
    """Whether it is one, with or without a name before it: Ops <ops@example.com>."""
    found = getaddresses([text])
    return text.isprintable() and len(found) == 1 and bool(re.fullmatch(r"[^@\s]+@[^@\s]+", found[0][1]))


class LogsConfig(_Section):
    """Log lines of `windlass up`, beside what it prints."""

    in_database: bool = Field(
        default=False, description="Keep them in the table windlass.logs too, for `retention.logs_s`."
    )
    traces_endpoint: str | None = Field(
        default=None,
        description="Where traces of cycles and tasks go, by OTLP over HTTP; needs the extra windlass[otel].",
    )

    @field_validator("traces_endpoint")
    @classmethod
    def _is_an_address(cls, endpoint: str | None) -> str | None:
        problem = problem_of_web_address(endpoint) if endpoint is not None else None
        if problem is not None:
            raise ValueError(f"it {problem}")
        return endpoint


class Config(_Section):
    database_url: SecretStr | None = Field(
        default=None,
        description="PostgreSQL 14 or newer. Without it, windlass starts its own in the data directory.",
        json_schema_extra={"env": "DATABASE_URL"},
    )
    data_dir: Path | None = Field(
        default=None, description="Where the embedded PostgreSQL lives. Without it: the user's data directory."
    )
    supabase_url: str | None = _from_environment(
        "SUPABASE_URL", "The project's address, to say where its database is found."
    )
    supabase_service_role_key: SecretStr | None = _from_environment(
        "SUPABASE_SERVICE_ROLE_KEY", "Accepted and kept secret; windlass speaks to the database itself."
    )
    runpod_api_key: SecretStr | None = _from_environment("RUNPOD_API_KEY", "For Runpod fleets.")
    runpod_endpoint: str = Field(
        default=RUNPOD_ENDPOINT,
        description="Where Runpod's API, or an emulator of it, answers.",
        json_schema_extra={"env": "RUNPOD_ENDPOINT"},
    )
    runpod_ssh_key_file: Path | None = _from_environment(
        "RUNPOD_SSH_PRIVATE_KEY_PATH", "The private key that opens pods, for Runpod fleets with `auto_start_worker`."
    )
    hetzner_api_token: SecretStr | None = _from_environment("HCLOUD_TOKEN HETZNER_API_TOKEN", "For Hetzner fleets.")
    hetzner_endpoint: str = Field(
        default=HETZNER_ENDPOINT,
        description="Where Hetzner's API, or an emulator of it, answers.",
        json_schema_extra={"env": "HCLOUD_ENDPOINT"},
    )
    hetzner_network_id: int | None = _from_environment("HETZNER_NETWORK_ID", "The private network of Hetzner fleets.")
    ray_address: str | None = _from_environment(
        "RAY_ADDRESS", "The head of a Ray cluster, as host:port. Without it, `up` starts one where a fleet needs it."
    )
    control_plane_ip: str | None = _from_environment(
        "RGRID_CONTROL_PLANE_IP", "Where machines in a private network find the control plane."
    )
    max_payload_bytes: int = Field(
        default=MAX_PAYLOAD_BYTES, gt=0, description="Largest payload or result of a task, as JSON."
    )
    retention: Retention = Retention()
    worker: WorkerConfig = WorkerConfig()
    control: ControlConfig = ControlConfig()
    api: ApiConfig = ApiConfig()
    alerts: AlertsConfig = AlertsConfig()
    logs: LogsConfig = LogsConfig()
    fleets: dict[str, FleetConfig] = Field(default_factory=dict, description="One table per fleet.")

    @field_validator("hetzner_api_token", "runpod_api_key")
    @classmethod
    def _fits_into_a_header(cls, key: SecretStr | None) -> SecretStr | None:
        """Files and secrets of clusters often end in a line break. What libraries say of such a header quotes it."""
        if key is None:
            return None
        bare = key.get_secret_value().strip()
        if not re.fullmatch(r"[!-~]+", bare):
            raise ValueError("it must be one word of letters, digits and signs, as the vendor's console shows it")
        return SecretStr(bare)

    @field_validator("hetzner_endpoint", "runpod_endpoint")
    @classmethod
    def _address_of_api(cls, endpoint: str, field: ValidationInfo) -> str:
        usual = HETZNER_ENDPOINT if field.field_name == "hetzner_endpoint" else RUNPOD_ENDPOINT
        if not endpoint.startswith(("https://", "http://")):
            raise ValueError("it must be an address that begins with https://, such as " + usual)
        endpoint = endpoint.rstrip("/")
        # The version we speak; elsewhere all that is heard is 404.
        version = usual[usual.rindex("/") :]
        if not endpoint.endswith(version):
            raise ValueError(f"it must end in {version}, as {usual} does")
        return endpoint

    @field_validator("ray_address")
    @classmethod
    def _address_of_head(cls, address: str | None) -> str | None:
        if address is not None and not re.fullmatch(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}", address):
            hint = ": Ray Client cannot be used, the dispatcher is a driver" if address.startswith("ray://") else ""
            raise ValueError(f"it must be the head's own address, as 10.0.0.5:6379{hint}")
        return address

    @field_validator("fleets")
    @classmethod
    def _fleet_names(cls, fleets: dict[str, FleetConfig]) -> dict[str, FleetConfig]:
        for name in fleets:
            if not is_name(name):
                raise ValueError(f"{name!r} cannot be a fleet's name: letters, digits and _ . : -, at most 63 of them")
        return fleets

    @model_validator(mode="after")
    def _supabase_has_a_database(self) -> Self:
        if self.supabase_url is not None and self.database_url is None and self.data_dir is None:
            raise ValueError(
                f"supabase_url is {self.supabase_url}, but windlass connects to the database itself: set DATABASE_URL "
                "to the connection string that the project's dashboard shows under Connect"
            )
        return self

    @property
    def machine_url(self) -> str | None:
        """Where machines call the control plane; None if that is not known."""
        if self.api.url is not None:
            return self.api.url
        host = self.control_plane_ip or self.api.host
        if not self.api.port or host in _ANYWHERE:
            return None
        return f"http://[{host}]:{self.api.port}" if ":" in host else f"http://{host}:{self.api.port}"
