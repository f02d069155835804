"""Compares the configuration of an adopted table with the real one: columns, types, privileges, row security, triggers.

Changes nothing. Each finding says what to do about it. An error means that rows could not be read or written.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import asyncpg

from windlass.model.adoption import AdoptionConfig, AdoptionFinding
from windlass.store.adoption_script import payload_query
from windlass.store.connection import connected, words
from windlass.store.migration import applied_migrations, check_schema_version
from windlass.store.queries import read_queries

QUERIES = read_queries("windlass.store", "adoption.sql")
# Types whose text identifies a value: equal values have equal texts.
KEY_TYPES = ("uuid", "smallint", "integer", "bigint", "text", "character varying")
_JSON = ("json", "jsonb", "text", "character varying")


async def check_table(dsn: str, name: str, config: AdoptionConfig) -> list[AdoptionFinding]:
    """Compare the configuration with the real table. Changes nothing."""
    place = config.place(name)
    async with connected(dsn, "checking the table") as connection, connection.transaction(readonly=True):
        check_schema_version(max(await applied_migrations(connection), default=None))
        table = await connection.fetchrow(QUERIES["adopted_table"], *place)
        if table is None:
            message = f"{'.'.join(place)} not found, or not visible to this user"
            return [AdoptionFinding("table", message, f"set adopt.{name}.table", is_error=True)]
        columns = {row["name"]: row for row in await connection.fetch(QUERIES["adopted_columns"], *place)}
        triggers = await connection.fetch(QUERIES["adopted_triggers"], *place)
        findings = [*_check_rights(place, table), *_check_columns(name, config, columns), *_check_triggers(triggers)]
        if not any(finding.is_error for finding in findings):
            try:
                await connection.fetch(payload_query(name, config))
                findings.append(AdoptionFinding("payload", "its expression is valid"))
            except asyncpg.PostgresError as error:
                findings.append(
                    AdoptionFinding("payload", words(error), f"correct the payload of adopt.{name}", is_error=True)
                )
        return findings


def _check_rights(place: tuple[str, str], table: Mapping[str, Any]) -> Iterator[AdoptionFinding]:
    if table["kind"] not in ("r", "p"):
        yield AdoptionFinding("table", f"{'.'.join(place)} is not a table", "name the table behind it", is_error=True)
        return
    yield AdoptionFinding("table", f"{'.'.join(place)}, owned by {table['owner']}")
    for role, is_member in (
        (table["owner"], table["may_act_as_owner"]),
        (table["windlass_owner"], table["may_act_as_windlass"]),
    ):
        if not is_member:
            yield AdoptionFinding(
                "privileges", f"this user may not act as {role}", f"grant {role} to this user", is_error=True
            )
    if table["owner"] != table["windlass_owner"] and not table["is_owner_superuser"]:
        yield AdoptionFinding(
            "table owner",
            f"{table['owner']} must be trusted: triggers of the table run in database sessions of Windlass",
        )
    if table["is_rls_forced"]:
        yield AdoptionFinding(
            "row security",
            "is forced for the owner of the table too: Windlass could not write its rows",
            f"alter table ... no force row level security, or alter role {table['owner']} bypassrls",
            is_error=True,
        )
    elif table["has_rls"]:
        yield AdoptionFinding("row security", "is on: policies apply to your users and not to Windlass")
    if table["can_anyone_create"]:
        yield AdoptionFinding(
            "schema",
            f"every role may create objects in schema {place[0]}, and functions of Windlass would run with them",
            f"revoke create on schema {place[0]} from public",
            is_error=True,
        )
    if table["deferred_constraints"]:
        yield AdoptionFinding(
            "constraints",
            f"{', '.join(table['deferred_constraints'][:5])} would refuse a row at commit, and the outcome of its task"
            " would be lost with it",
            "make it initially immediate",
            is_error=True,
        )


def _check_columns(
    name: str, config: AdoptionConfig, columns: Mapping[str, Mapping[str, Any]]
) -> Iterator[AdoptionFinding]:
    payload = (config.payload,) if isinstance(config.payload, str) else config.payload or ()
    named = {
        "key": config.key,
        "order_by": config.order_by,
        **{f"columns.{setting}": getattr(config.columns, setting) for setting in type(config.columns).model_fields},
        **{f"payload ({column})": column for column in payload},
    }
    has_error = False
    for setting, column in named.items():
        if column is not None and column not in columns:
            has_error = True
            yield AdoptionFinding(
                "columns", f"there is no column {column}", f"change adopt.{name}.{setting}", is_error=True
            )
    if has_error:
        return
    yield from _check_key(config, columns)
    for setting, column in config.columns.written().items():
        yield from _check_written(name, setting, columns[column], config)
    run_after = config.columns.run_after
    if run_after is not None and columns[run_after]["category"] != "D":
        yield AdoptionFinding("columns", f"{run_after} is not a time", "change columns.run_after", is_error=True)
    yield from _check_states(config, columns[config.columns.status])


def _check_key(config: AdoptionConfig, columns: Mapping[str, Mapping[str, Any]]) -> Iterator[AdoptionFinding]:
    key = columns[config.key]
    if key["base_type"] not in KEY_TYPES:
        advice = f"name a column of type {', '.join(KEY_TYPES)}"
        yield AdoptionFinding("key", f"{config.key} has type {key['type']}", advice, is_error=True)
    elif not key["is_unique"] or not key["is_not_null"]:
        advice = "name the primary key, or a column that is unique and not null"
        yield AdoptionFinding("key", f"{config.key} does not identify a row", advice, is_error=True)
    else:
        yield AdoptionFinding("key", f"{config.key}, {key['type']}")
    order = config.order_by
    if order is not None and not columns[order]["is_not_null"]:
        yield AdoptionFinding("order_by", f"{order} may be null", "name a column without nulls", is_error=True)
    elif order is not None and not columns[order]["has_index"]:
        advice = "create an index, or leave out order_by"
        yield AdoptionFinding("order_by", f"{order} has no index: each batch of the backfill sorts", advice)


def _check_written(
    adoption: str, setting: str, column: Mapping[str, Any], config: AdoptionConfig
) -> Iterator[AdoptionFinding]:
    """Whether Windlass can write its values into the column."""
    name = column["name"]
    leave_out = f"leave out columns.{setting}"
    if "columns" not in config.model_fields_set:
        others = {other: value for other, value in config.columns.written().items() if other not in (setting, "status")}
        named = ", ".join(f'{other} = "{value}"' for other, value in others.items())
        leave_out = f"add [adopt.{adoption}.columns] without {setting}: {named}"
    problems = {
        f"{name} is generated": (column["is_generated"], leave_out),
        f"{name} must not be null, but is empty at first": (
            column["is_not_null"] and setting not in ("status", "attempts"),
            f"alter table ... alter column {name} drop not null, or {leave_out}",
        ),
        f"{name} is an integer, but progress is a number from 0 to 1": (
            setting == "progress" and column["base_type"] in ("smallint", "integer", "bigint"),
            "use real or numeric",
        ),
        f"{name} is not a time": (setting.endswith("_at") and column["category"] != "D", leave_out),
        f"{name} has type {column['type']}, and a result is JSON": (
            setting == "result" and not config.result_path and column["base_type"] not in _JSON,
            "use jsonb, or set result_path",
        ),
        f"{name} refers to {column['references_table']}, which does not contain the workers of Windlass": (
            setting == "worker" and column["references_table"] is not None,
            f"drop the foreign key, or {leave_out}",
        ),
    }
    for message, (is_so, advice) in problems.items():
        if is_so:
            yield AdoptionFinding("columns", message, advice, is_error=True)


def _check_states(config: AdoptionConfig, column: Mapping[str, Any]) -> Iterator[AdoptionFinding]:
    statuses = list(dict.fromkeys(config.states.by_state().values()))
    missing = [status for status in statuses if column["labels"] and status not in column["labels"]]
    if missing:
        message = f"type {column['type']} has no value {missing[0]!r}; it has {', '.join(column['labels'])}"
        yield AdoptionFinding("states", message, "change the states, or add the value", is_error=True)
        return
    for check in column["checks"]:
        # Only constraints that list statuses: others compare something else.
        if any(f"'{status}'" in check for status in statuses):
            refused = [status for status in statuses if f"'{status}'" not in check]
            if refused:
                yield AdoptionFinding(
                    "states", f"{check} does not mention {refused[0]!r}", "change the states, or the constraint"
                )
    yield AdoptionFinding("states", f"{config.columns.status}: {', '.join(statuses)}")


def _check_triggers(triggers: list[Mapping[str, Any]]) -> Iterator[AdoptionFinding]:
    ours = [trigger for trigger in triggers if trigger["is_ours"]]
    others = [trigger for trigger in triggers if not trigger["is_ours"] and not trigger["is_disabled"]]
    for trigger in ours:
        if trigger["is_disabled"]:
            advice = f"alter table ... enable trigger {trigger['name']}, then windlass doctor --repair"
            yield AdoptionFinding("triggers", f"{trigger['name']} is disabled", advice, is_error=True)
    if others:
        shown = ", ".join(trigger["name"] for trigger in others[:5])
        yield AdoptionFinding("triggers", f"these also run when Windlass writes a row: {shown}")
    yield AdoptionFinding("triggers", f"{len(ours)} of 4 are installed" if ours else "none of Windlass yet")
