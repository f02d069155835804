"""Renders the SQL that adopts a table, and the SQL that removes it again, from adoption_template.sql.

Pure: no connection is needed. Every name and text of the configuration is quoted, and no value can end the quoting of a
function's body. Only `payload_sql` is inserted as it is: it is SQL of the person who applies the script.
"""

import hashlib
import json
import re
from collections.abc import Mapping

from windlass.model.adoption import WRITTEN_COLUMNS, AdoptionConfig
from windlass.store.queries import read_queries

_TEMPLATES = read_queries("windlass.store", "adoption_template.sql")
_PLACEHOLDER = re.compile(r"@(\w+)@")
# The parameters of the generated function that writes a row, by the setting of their column.
_VALUES = {setting: f"p_{setting}" for setting in WRITTEN_COLUMNS}
_WRITE_ARGUMENTS = "text, text[], text, integer, text, timestamptz, timestamptz, real, jsonb, text, text"
_REPORT_ARGUMENTS = "text, text, text, boolean, text, jsonb, integer, timestamptz, text"


def apply_script(name: str, config: AdoptionConfig) -> str:
    """The script that adopts the table, as one transaction."""
    schema, table = config.place(name)
    key, status = identifier(config.key), identifier(config.columns.status)
    states = config.states.by_state()
    active = sorted({states[state] for state in ("queued", "running", "retrying")})
    written = config.columns.written()
    order = config.order_by or config.key
    functions = _names(name, schema, table)
    values = {
        **functions,
        "key": key,
        "status": status,
        "states_json": f"{literal(json.dumps(states))}::jsonb",
        "max_attempts": str(config.max_attempts),
        "timeout_s": "null" if config.timeout_s is None else repr(config.timeout_s),
        "active": f"array[{', '.join(map(literal, active))}]",
        "queued": literal(states["queued"]),
        "queue_of_r": _queue(name, config),
        "payload_of_r": _payload(config),
        "priority_of_r": f"r.{identifier(config.columns.priority)}::integer" if config.columns.priority else "0",
        "run_after_of_r": (
            f"r.{identifier(config.columns.run_after)}::timestamptz"
            if config.columns.run_after
            else "null::timestamptz"
        ),
        "owner_of_r": _owner(config),
        "means_of_r": _meanings(f"r.{status}::text", states),
        "means_of_status": _meanings("p_status", states),
        # The owner of the table chooses the queue only if the configuration says so.
        "reported_queue": "p_queue" if config.columns.queue else _queue(name, config),
        "status_of_old": _status("old", states),
        "status_of_new": _status("new", states),
        # A task that reports progress changes its row only if the row shows it.
        "old_progress": "old.progress" if config.columns.progress else "0",
        "new_progress": "new.progress" if config.columns.progress else "0",
        "declarations": "\n".join(
            f"  w_{setting} {functions['table']}.{identifier(column)}%type := {_value(setting, config)};"
            for setting, column in written.items()
        ),
        "assignments": ", ".join(f"{identifier(column)} = w_{setting}" for setting, column in written.items()),
        "order": identifier(order),
        "order_list": ", ".join(f"t.{identifier(column)}" for column in dict.fromkeys((order, config.key))),
        "after": f"(t.{identifier(order)}, t.{key}) > (v_order, v_key)" if config.order_by else f"t.{key} > v_key",
    }
    return _render("apply", {**values, "checksum": literal(checksum(name, config))})


def remove_script(name: str, schema: str, table: str) -> str:
    """The script that removes all of it. The rows of unfinished tasks are queued again."""
    return _render("remove", _names(name, schema, table))


def checksum(name: str, config: AdoptionConfig) -> str:
    """Changes with the configuration and with the template."""
    text = json.dumps([name, config.model_dump(mode="json"), _TEMPLATES["apply"]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    quoted = "'" + text.replace("'", "''") + "'"
    # E'' is right with standard_conforming_strings off, too.
    return "E" + quoted.replace("\\", "\\\\") if "\\" in text else quoted


def _render(template: str, values: Mapping[str, str]) -> str:
    tag = "windlass"
    while any(f"${tag}" in value for value in values.values()):
        tag += "_"
    # In one pass: a value that looks like a placeholder is not replaced.
    text = _PLACEHOLDER.sub(lambda found: {**values, "q": f"${tag}$"}[found[1]], _TEMPLATES[template])
    return text + ";\n"


def _names(name: str, schema: str, table: str) -> dict[str, str]:
    qualified = f"{identifier(schema)}.{identifier(table)}"
    functions = {
        "row_changed": identifier(f"{name}_row_changed"),
        "task_changed": identifier(f"{name}_task_changed"),
        "report": identifier(f"{name}_report"),
        "write": identifier(f"{name}_write"),
        "rows": identifier(f"{name}_rows"),
        "next": identifier(f"{name}_next"),
        "active_rows": identifier(f"{name}_active"),
    }
    write = f"windlass_adopt.{functions['write']}({_WRITE_ARGUMENTS})"
    read = ", ".join(
        f"windlass_adopt.{functions[function]}({arguments})"
        for function, arguments in (("rows", "text[]"), ("next", "jsonb, integer"), ("active_rows", ""))
    )
    return {
        **functions,
        **{f"on_{event}": identifier(f"windlass_adopt_{name}_{event}") for event in ("insert", "update", "delete")},
        "on_truncate": identifier(f"windlass_adopt_{name}_truncate"),
        "on_task": identifier(f"adopt_{name}"),
        "name": literal(name),
        "schema": identifier(schema),
        "table": qualified,
        "table_text": literal(qualified),
        "schema_text": literal(schema),
        "table_name_text": literal(table),
        "write_text": literal(write),
        **{f"check_user_of_{name}": _check_user(functions[name]) for name in ("write", "rows", "next", "active_rows")},
        "report_arguments": _REPORT_ARGUMENTS,
        "grant_report": literal(
            f"grant execute on function windlass_adopt.{functions['report']}({_REPORT_ARGUMENTS}) to %I"
        ),
        "grant_functions": literal(f"grant execute on function {write}, {read} to %I"),
    }


def _check_user(function: str) -> str:
    is_function = f"p.oid operator(pg_catalog.=) {literal(f'windlass_adopt.{function}')}::pg_catalog.regproc"
    return (
        f"if current_user operator(pg_catalog.<>) (select pg_catalog.pg_get_userbyid(p.proowner)"  # noqa: S608
        f" from pg_catalog.pg_proc p where {is_function}) then"
        " raise exception 'this function no longer runs as its owner: run `windlass db adopt` with --apply again';"
        " end if;"
    )


def _queue(name: str, config: AdoptionConfig) -> str:
    queue = literal(config.queue or name)
    return f"coalesce(r.{identifier(config.columns.queue)}::text, {queue})" if config.columns.queue else queue


def payload_query(name: str, config: AdoptionConfig) -> str:
    """A query that reads no row and fails if the payload cannot be computed."""
    schema, table = config.place(name)
    return f"select {_payload(config)}::jsonb from {identifier(schema)}.{identifier(table)} as r limit 0"  # noqa: S608


def _payload(config: AdoptionConfig) -> str:
    if config.payload_sql is not None:
        # On lines of its own: it may end with a comment.
        return f"(\n{config.payload_sql}\n)"
    if isinstance(config.payload, str):
        return f"to_jsonb(r.{identifier(config.payload)})"
    if config.payload is not None:
        pairs = ", ".join(f"{literal(column)}, r.{identifier(column)}" for column in config.payload)
        return f"jsonb_build_object({pairs})"
    return f"(to_jsonb(r) - array[{', '.join(map(literal, config.columns.written().values()))}])"


def _owner(config: AdoptionConfig) -> str:
    if config.columns.owner is not None:
        return f"'jwt:' || r.{identifier(config.columns.owner)}::text"
    # The signed-in user of PostgREST (Supabase), as in schema/03_end_users.sql.
    return "'jwt:' || (nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'sub')"


def _value(setting: str, config: AdoptionConfig) -> str:
    if setting == "result" and config.result_path:
        path = ", ".join(map(literal, config.result_path))
        return f"p_result #>> array[{path}]"
    return _VALUES[setting]


def _meanings(status: str, states: Mapping[str, str]) -> str:
    """The states that a status stands for."""
    cases = " ".join(
        f"when {literal(text)} then array[{', '.join(literal(s) for s, t in states.items() if t == text)}]"
        for text in dict.fromkeys(states.values())
    )
    return f"case {status} {cases} else '{{}}'::text[] end"


def _status(row: str, states: Mapping[str, str]) -> str:
    """The status that belongs to a task."""
    cases = " ".join(f"when {literal(state)} then {literal(text)}" for state, text in states.items())
    return f"case windlass_internal.adopted_state({row}.status, {row}.error_code) {cases} end"
