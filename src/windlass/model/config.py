"""Everything that can be set, validated in one place.

Where values come from (file, environment, command line) is no concern of this module: see configure.py.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from windlass.model.task import MAX_PAYLOAD_BYTES

_DAY_S = 86_400.0


class _Section(BaseModel):
    # An unknown key is a typo, and a typo that is ignored costs money.
    model_config = ConfigDict(frozen=True, extra="forbid")


class Retention(_Section):
    """How long finished things are kept."""

    complete_s: float = Field(default=7 * _DAY_S, ge=0, description="Completed tasks.")
    failed_s: float = Field(default=30 * _DAY_S, ge=0, description="Dead letters.")
    events_s: float = Field(default=30 * _DAY_S, ge=0, description="Events: the story of each task and worker.")
    cycles_s: float = Field(default=2 * _DAY_S, ge=0, description="Snapshots and plans of the control loop.")
    logs_s: float = Field(default=3 * _DAY_S, ge=0, description="Log lines kept in the database.")


class WorkerConfig(_Section):
    """How workers behave that are not told otherwise on their command line."""

    heartbeat_interval_s: float = Field(default=5.0, gt=0, description="How often a worker says that it lives.")
    lease_s: float = Field(default=30.0, gt=0, description="Silent for longer than this, its tasks go to others.")
    timeout_s: float | None = Field(default=None, gt=0, description="Time limit of tasks that bring none of their own.")
    drain_timeout_s: float = Field(
        default=600.0, ge=0, description="From the wish to end until tasks at hand are given back."
    )
    memory_limit_mb: int | None = Field(
        default=None,
        gt=0,
        description="Memory one handler's process may use. Without it: nine tenths of the machine's.",
    )

    @model_validator(mode="after")
    def _several_beats_fit_into_the_lease(self) -> "WorkerConfig":
        if self.lease_s < 3 * self.heartbeat_interval_s:
            raise ValueError(
                f"lease_s is {self.lease_s:g} and heartbeat_interval_s is {self.heartbeat_interval_s:g}: "
                "at least three beats must fit into a lease, or one lost packet costs a worker its tasks"
            )
        return self


class Config(_Section):
    database_url: SecretStr | None = Field(
        default=None, description="PostgreSQL 14 or newer. Without it, windlass starts its own in the data directory."
    )
    data_dir: Path | None = Field(
        default=None, description="Where the embedded PostgreSQL lives. Without it: the user's data directory."
    )
    max_payload_bytes: int = Field(
        default=MAX_PAYLOAD_BYTES, gt=0, description="Largest payload or result of a task, as JSON."
    )
    retention: Retention = Retention()
    worker: WorkerConfig = WorkerConfig()
