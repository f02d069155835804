"""The files in deploy/ and the release workflow: each is checked by the tool that reads it, as far as one can be
installed.

Not run here: an image build, a cluster, a Terraform apply, Grafana and Supabase itself.
"""

import asyncio
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import hcl2
import jsonschema
import pytest
import yaml

from support.api_fixture import open_api
from support.certificates import new_authority
from support.file_checkers import cloud_init_schema
from support.postgres_servers import do_without
from support.queue_sql import RoleDsn, connected
from windlass.config_loader import load_config
from windlass.model.auth import Role
from windlass.model.config import WorkerConfig
from windlass.model.fleet import FleetConfig
from windlass.model.runpod import RunpodSettings
from windlass.store.export_sql import ROLES
from windlass.wiring.project import KEYS, supervisor_stop_s

DEPLOY = Path(__file__).parents[2] / "deploy"
RELEASE_WORKFLOW = DEPLOY.parent / ".github" / "workflows" / "release.yml"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "windlass-tests"
PODMONITOR_SCHEMA = Path(__file__).parents[1] / "support" / "podmonitor.schema.json"
BIN = Path(sys.executable).parent
TIMEOUT_S = 120
# Lower is stricter; a unit without any protection has 9.2. A handler decides what a worker needs.
MAX_EXPOSURE = {"windlass.service": 2.0, "windlass-cycle.service": 2.0, "windlass-worker@.service": 4.0}


def run(*command: str | Path, **options: Any) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def system_program(name: str) -> str:
    unpacked = CACHE / name
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin") or (str(unpacked) if unpacked.exists() else None)
    return found or do_without(f"{name} not found: on Debian, tools/system-packages.sh installs it (as root)")


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units, with a program and a user that exist on every host."""
    for unit in (DEPLOY / "systemd").iterdir():
        text = unit.read_text().replace("/srv/app/.venv/bin/windlass", "/bin/true").replace("User=app", "User=daemon")
        (tmp_path / unit.name).write_text(text)
    return tmp_path


def test_systemd_units_are_valid(units: Path) -> None:
    found = sorted(units.iterdir())
    assert len(found) == 4
    said = run(system_program("systemd-analyze"), "verify", *found)
    # systemd also names problems of the host's own units.
    assert not [line for line in said.splitlines() if "windlass" in line], said


def test_units_load_secrets_from_places_that_exist() -> None:
    """systemd knows no optional credential with a path: `-NAME:/path` is named -NAME, and must exist."""
    units = {unit.name: unit.read_text() for unit in (DEPLOY / "systemd").glob("*.service")}
    loaded = {name: re.findall(r"^LoadCredential=(.*)$", text, re.MULTILINE) for name, text in units.items()}
    assert loaded == {
        "windlass.service": ["WINDLASS:/etc/windlass"],
        "windlass-cycle.service": ["WINDLASS:/etc/windlass"],
        "windlass-worker@.service": ["DATABASE_URL:/etc/windlass/DATABASE_URL"],
    }


@pytest.mark.parametrize("name", sorted(file.name for file in (DEPLOY / "systemd").glob("*.service")))
def test_systemd_service_is_hardened(units: Path, name: str) -> None:
    said = run(system_program("systemd-analyze"), "security", "--offline=yes", units / name)
    exposure = re.search(r"exposure level for \S+: ([\d.]+)", said)
    assert exposure is not None, said
    assert float(exposure[1]) <= MAX_EXPOSURE[name]


def test_service_managers_wait_for_the_shutdown_of_a_cloud_fleet() -> None:
    hetzner = FleetConfig(provider="hetzner", handler="a:b")
    runpod = FleetConfig(provider="runpod", handler="a:b", runpod=RunpodSettings(image="i:1"))
    longest_s = max(supervisor_stop_s(fleet) for fleet in (hetzner, runpod))
    unit = (DEPLOY / "systemd" / "windlass.service").read_text()
    waits_s = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert waits_s is not None and int(waits_s[1]) >= longest_s
    compose = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())
    grace = re.fullmatch(r"(\d+)s", compose["services"]["windlass"]["stop_grace_period"])
    assert grace is not None and int(grace[1]) >= longest_s
    # Kubernetes keeps the machines, so only the running cycle ends.
    (pod,) = (
        each["spec"]["template"]["spec"]
        for each in yaml.safe_load_all((DEPLOY / "kubernetes" / "up.yaml").read_text())
        if each["kind"] == "Deployment"
    )
    assert "--leave-workers" in pod["containers"][0]["args"]
    worker = re.search(r"^TimeoutStopSec=(\d+)$", (DEPLOY / "systemd" / "windlass-worker@.service").read_text(), re.M)
    assert worker is not None and int(worker[1]) > WorkerConfig().drain_timeout_s


def test_upgrading_page_keeps_workers_with_the_delivered_files() -> None:
    page = (DEPLOY.parent / "docs" / "upgrading.md").read_text()
    unit = (DEPLOY / "systemd" / "windlass.service").read_text()
    start = re.search(r"^ExecStart=.*\n", unit, re.MULTILINE)
    assert start is not None
    assert f"ExecStart=\n{start[0].replace(' up ', ' up --leave-workers ')}" in page
    command = re.search(r"^CMD (\[.*\])$", (DEPLOY / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    assert command is not None
    described = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0])
    kept = ["up", "--leave-workers", *yaml.safe_load(command[1])[1:]]
    assert described == {"services": {"windlass": {"command": kept}}}
    assert "windlass" in yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]


def test_dockerfile_passes_hadolint() -> None:
    run(BIN / "hadolint", DEPLOY / "docker" / "Dockerfile")


def test_compose_file_follows_the_specification() -> None:
    run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "docker" / "compose.yaml")


def test_release_workflow_follows_the_schema() -> None:
    run(BIN / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", RELEASE_WORKFLOW)


def test_release_workflow_pins_actions_and_separates_rights() -> None:
    described = yaml.safe_load(RELEASE_WORKFLOW.read_text())
    assert described["permissions"] == {}
    uses = [step["uses"] for job in described["jobs"].values() for step in job["steps"] if "uses" in step]
    assert uses
    assert [use for use in uses if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", use)] == []
    for name, job in described["jobs"].items():
        # What dependencies could run in: the sources are there, and rights are not.
        has_sources = any("actions/checkout@" in step.get("uses", "") for step in job["steps"])
        assert has_sources == (job["permissions"] == {"contents": "read"}), name
    assert described["jobs"]["publish"]["environment"] == "pypi"


def test_release_is_tested_by_what_must_be_green_before_a_change_lands() -> None:
    steps = yaml.safe_load(RELEASE_WORKFLOW.read_text())["jobs"]["test"]["steps"]
    commands = [step["run"] for step in steps if "run" in step]
    # As root: .ci/run then runs `make test` as an ordinary user, and the tests that need root.
    assert commands == ['sudo env "PATH=$PATH" bash .ci/run']
    script = (DEPLOY.parent / ".ci" / "run").read_text()
    assert re.findall(r"make test[\w-]*", script) == ["make test", "make test", "make test-root"]


def pod_of(name: str) -> dict[str, Any]:
    """The specification of the pod that a manifest describes."""
    spec = yaml.safe_load((DEPLOY / "kubernetes" / name).read_text())["spec"]
    pod: dict[str, Any] = spec.get("jobTemplate", {"spec": spec})["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("name", ["up.yaml", "cycle.yaml"])
def test_user_of_the_pod_may_read_its_secrets(name: str) -> None:
    pod = pod_of(name)
    modes = [volume["secret"].get("defaultMode", 0o644) for volume in pod["volumes"] if "secret" in volume]
    assert modes
    # The files belong to root and to the group `fsGroup`.
    if not all(mode & 0o004 for mode in modes):
        assert pod["securityContext"].get("fsGroup"), "another user than root cannot read the secret"
        assert all(mode & 0o040 for mode in modes)


@pytest.mark.parametrize("name", ["up.yaml", "cycle.yaml"])
def test_every_key_that_kubernetes_needs_has_a_source(name: str) -> None:
    folder = DEPLOY / "kubernetes"
    fleets = load_config(folder / "windlass.toml").config.fleets.values()
    needed = {"DATABASE_URL", *(KEYS[fleet.provider] for fleet in fleets)}
    assert needed == {"DATABASE_URL", "RUNPOD_API_KEY"}
    pod = pod_of(name)
    (container,) = pod["containers"]
    (mount,) = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == "secrets"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables == {f"{key}_FILE": f"{mount}/{key}" for key in needed}
    created = re.findall(r"--from-literal=(\w+)=", (folder / "kustomization.yaml").read_text())
    assert set(created) == needed


@pytest.mark.parametrize("name", ["up.yaml", "service.yaml", "cycle.yaml"])
def test_kubernetes_manifest_follows_the_api(name: str) -> None:
    run(BIN / "kubernetes-validate", "--strict", DEPLOY / "kubernetes" / name)


def test_kustomization_names_files_that_exist() -> None:
    folder = DEPLOY / "kubernetes"
    described = yaml.safe_load((folder / "kustomization.yaml").read_text())
    files = [*described["resources"], *described["configMapGenerator"][0]["files"]]
    assert [name for name in files if not (folder / name).is_file()] == []
    manifests = [yaml.safe_load((folder / name).read_text()) for name in described["resources"]]
    assert [manifest["kind"] for manifest in manifests] == ["Deployment", "Service", "PodMonitor"]


def test_kustomization_builds_what_the_api_accepts(tmp_path: Path) -> None:
    built = list(yaml.safe_load_all(run(system_program("kubectl"), "kustomize", DEPLOY / "kubernetes")))
    found = {each["kind"]: each for each in built}
    assert found.keys() == {"ConfigMap", "Deployment", "Service", "PodMonitor"}
    assert {each["metadata"]["namespace"] for each in built} == {"windlass"}
    # The name has a hash of the file: a change of windlass.toml replaces the pods.
    volumes = found["Deployment"]["spec"]["template"]["spec"]["volumes"]
    mounted = [volume["configMap"]["name"] for volume in volumes if "configMap" in volume]
    assert mounted == [found["ConfigMap"]["metadata"]["name"]] != ["windlass-config"]
    for kind in ("ConfigMap", "Deployment", "Service"):
        path = tmp_path / f"{kind}.yaml"
        path.write_text(yaml.safe_dump(found[kind]))
        run(BIN / "kubernetes-validate", "--strict", path)


def test_podmonitor_follows_the_definition_of_the_operator() -> None:
    schema = json.loads(PODMONITOR_SCHEMA.read_text())
    described = yaml.safe_load((DEPLOY / "kubernetes" / "podmonitor.yaml").read_text())
    jsonschema.validate(described, schema)
    described["spec"]["podMetricsEndpoints"][0]["authorisation"] = {}
    with pytest.raises(jsonschema.ValidationError, match="authorisation"):
        jsonschema.validate(described, schema)


def test_job_of_the_podmonitor_is_the_one_of_the_alert_rules() -> None:
    described = yaml.safe_load((DEPLOY / "kubernetes" / "podmonitor.yaml").read_text())["spec"]
    labels = yaml.safe_load((DEPLOY / "kubernetes" / "up.yaml").read_text())["spec"]["template"]["metadata"]["labels"]
    assert described["selector"]["matchLabels"].items() <= labels.items()
    expected = re.findall(r'job="(\w+)"', (DEPLOY / "prometheus" / "alerts.yml").read_text())
    assert set(expected) == {labels[described["jobLabel"]]}


def test_kubernetes_configuration_is_valid_and_has_a_budget() -> None:
    path = DEPLOY / "kubernetes" / "windlass.toml"
    config = load_config(path).config
    assert config.fleets["renders"].budget_per_day == 20
    assert tomllib.loads(path.read_text())["api"]["plain_http"]


def test_terraform_example_opens_no_port_of_machines() -> None:
    with (DEPLOY / "terraform" / "main.tf").open() as file:
        described = hcl2.load(file)
    firewalls = {name.strip('"'): body for entry in described["resource"] for kind, found in entry.items()
                 if kind.strip('"') == "hcloud_firewall" for name, body in found.items()}  # fmt: skip
    assert "rule" not in firewalls["machines"]
    assert {rule["port"].strip('"') for rule in firewalls["control_plane"]["rule"]} == {"22", "80", "443"}


def test_terraform_user_data_is_valid_cloud_config() -> None:
    judged = cloud_init_schema(DEPLOY / "terraform" / "cloud-init.yaml")
    assert (judged.returncode, judged.stderr) == (0, "")
    assert "Valid" in judged.stdout
    assert "deprecat" not in judged.stdout.lower()


def test_caddyfile_is_valid() -> None:
    said = run(system_program("caddy"), "adapt", "--config", DEPLOY / "caddy" / "Caddyfile", "--adapter", "caddyfile")
    assert '"127.0.0.1:8080"' in said


def test_nginx_configuration_is_valid(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    new_authority().issue(certificate, key)
    site = (DEPLOY / "nginx" / "windlass.conf").read_text()
    site = re.sub(r"/etc/letsencrypt\S+privkey.pem", str(key), site)
    site = re.sub(r"/etc/letsencrypt\S+fullchain.pem", str(certificate), site)
    # `nginx -t` binds what it listens on, and an ordinary user may not bind the ports below 1024.
    sockets = itertools.count()
    site = re.sub(r"(?<=listen )\S*\b(?:80|443)\b", lambda _: f"unix:{tmp_path}/{next(sockets)}", site)
    assert next(sockets) == 4
    (tmp_path / "nginx.conf").write_text(
        f"pid {tmp_path}/pid;\nerror_log {tmp_path}/error.log;\nevents {{}}\n"
        f"http {{ access_log off; client_body_temp_path {tmp_path}; proxy_temp_path {tmp_path}; "
        f"fastcgi_temp_path {tmp_path}; uwsgi_temp_path {tmp_path}; scgi_temp_path {tmp_path};\n{site} }}\n"
    )
    run(system_program("nginx"), "-t", "-p", tmp_path, "-c", tmp_path / "nginx.conf")


def test_edge_function_is_typed_and_passes_its_tests(tmp_path: Path) -> None:
    folder = DEPLOY / "supabase" / "functions" / "windlass-cycle"
    environment = {**os.environ, "DENO_DIR": str(tmp_path), "NO_COLOR": "1"}
    run(BIN / "deno", "check", "--no-remote", "index.ts", "index_test.ts", cwd=folder, env=environment)
    said = run(BIN / "deno", "test", "--no-remote", "--allow-net=127.0.0.1", cwd=folder, env=environment)
    assert "4 passed" in said


# What the extensions of Supabase provide, as far as the schedule uses it.
EXTENSIONS = """
create schema cron;
create table cron.job (name text, schedule text, command text);
create function cron.schedule(name text, schedule text, command text) returns bigint
language sql as $$ insert into cron.job values (name, schedule, command) returning 1::bigint $$;
create schema net;
create table net.request (url text, headers jsonb, body jsonb, timeout_milliseconds integer);
create function net.http_post(url text, headers jsonb, body jsonb, timeout_milliseconds integer) returns bigint
language sql as $$ insert into net.request values (url, headers, body, timeout_milliseconds) returning 1::bigint $$;
create schema vault;
create table vault.decrypted_secrets (name text, decrypted_secret text);
"""


async def test_scheduled_call_of_supabase_runs_a_cycle(dsn: str, connection: Any) -> None:
    schedule = (DEPLOY / "supabase" / "schedule.sql").read_text()
    async with open_api(dsn) as api:
        headers = await api.auth_headers(Role.OPERATOR)
        await connection.execute(EXTENSIONS)
        await connection.execute(
            "insert into vault.decrypted_secrets values ('windlass_url', 'http://control'), ('windlass_token', $1)",
            headers["Authorization"].removeprefix("Bearer "),
        )
        await connection.execute(re.sub(r"create extension .*;", "", schedule))
        job = await connection.fetchrow("select * from cron.job")
        assert (job["name"], job["schedule"]) == ("windlass-cycle", "* * * * *")
        await connection.execute(job["command"])
        request = await connection.fetchrow("select url, headers ->> 'Authorization' as token from net.request")
        path = request["url"].removeprefix("http://control")
        answer = await api.localhost.post(path, headers={"Authorization": request["token"]}, json={})
        assert (path, answer.status_code) == ("/internal/cycle", 200), answer.text


@pytest.fixture
async def supabase(role_dsn: RoleDsn, dsn: str, connection: Any) -> AsyncIterator[RoleDsn]:
    """The DSN of Supabase's users: PostgREST connects as `authenticator`. Its settings may be altered by `postgres`
    there, and by a superuser here."""
    for role in ("anon", "authenticated", "service_role"):
        if not await connection.fetchval("select exists (select from pg_roles where rolname = $1)", role):
            await connection.execute(f"create role {role} nologin noinherit")
    await connection.execute("create role authenticator login noinherit in role anon, authenticated, service_role")
    await connection.execute(ROLES)
    yield role_dsn
    await connection.execute("drop role authenticator")


async def test_exposed_schema_lets_signed_in_users_submit(supabase: RoleDsn, connection: Any) -> None:
    script = (DEPLOY / "supabase" / "expose.sql").read_text()
    notified: asyncio.Queue[str] = asyncio.Queue()
    await connection.add_listener("pgrst", lambda *call: notified.put_nowait(call[-1]))
    for _ in range(2):
        await connection.execute(script)
    async with asyncio.timeout(TIMEOUT_S):
        assert {await notified.get(), await notified.get()} == {"reload config", "reload schema"}
    await connection.execute("insert into windlass.open_queues (queue) values ('renders')")
    async with connected(supabase("authenticator")) as postgrest:
        exposed = await postgrest.fetchval("select current_setting('pgrst.db_schemas')")
        assert exposed == "public, graphql_public, windlass"
        # A request of a signed-in user for one of these schemas, as PostgREST makes it.
        async with postgrest.transaction():
            await postgrest.execute("set local role authenticated")
            await postgrest.execute("""select set_config('request.jwt.claims', '{"sub": "ann"}', true)""")
            task = await postgrest.fetchval("select windlass.submit_task(p_queue => 'renders')")
            assert await postgrest.fetchval("select id from windlass.my_tasks") == task


async def test_exposing_keeps_the_schemas_that_are_exposed(supabase: RoleDsn, connection: Any) -> None:
    await connection.execute("alter role authenticator set pgrst.db_schemas = 'api,public'")
    await connection.execute((DEPLOY / "supabase" / "expose.sql").read_text())
    async with connected(supabase("authenticator")) as postgrest:
        assert await postgrest.fetchval("select current_setting('pgrst.db_schemas')") == "api,public, windlass"
