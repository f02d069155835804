"""`windlass up` at a terminal: short lines, what to do next, reload, a second `up`, and the end of the terminal."""

import asyncio
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import httpx
import psutil
import pytest

from support.local_fleet import FleetHost, open_fleet_host
from support.worker_harness import PATIENCE_S, until
from windlass.cli.options import os_actor

LOGIN_LINK = re.compile(r"http://\S+/login\?key=wll_[\w-]+(?=\s)")


class Terminal:
    """A session with `windlass up`, as a window of a terminal program has it."""

    def __init__(self, host: FleetHost, *arguments: str, is_started_with_nohup: bool = False, **env: str) -> None:
        self.shown = ""
        self.pid, self._master = pty.fork()
        if self.pid == 0:
            os.chdir(host.folder)
            # Not inherited: the tests themselves may run with nohup.
            signal.signal(signal.SIGHUP, signal.SIG_IGN if is_started_with_nohup else signal.SIG_DFL)
            program = [sys.executable, "-m", "windlass", "up", *arguments]
            os.execve(program[0], program, host.windlass.with_env(**env).environment())  # noqa: S606

    def has(self, text: str) -> bool:
        while select.select([self._master], [], [], 0)[0]:
            try:
                self.shown += os.read(self._master, 65_536).decode(errors="replace")
            except OSError:
                break  # it has ended
        return text in self.shown

    def close(self) -> None:
        os.close(self._master)

    async def until_shown(self, text: str) -> None:
        await until(lambda: self.has(text), f"{text!r}\n{self.shown}")

    async def until_ended(self) -> None:
        await until(lambda: os.waitpid(self.pid, os.WNOHANG) != (0, 0), "the end of up")


@pytest.fixture
async def host(tmp_path: Path, dsn: str) -> AsyncIterator[FleetHost]:
    async with open_fleet_host(tmp_path, dsn) as host:
        yield host


async def test_up_at_a_terminal_shows_decisions_and_what_to_do_next(host: FleetHost) -> None:
    terminal = Terminal(host, "--port", "0")
    await terminal.until_shown("stop       Ctrl-C")
    assert " from windlass.toml; " in terminal.shown, "the settings in one line"
    assert f"started with pid {terminal.pid};" in terminal.shown, "the process that handles signals"
    assert "enqueue    windlass enqueue work" in terminal.shown
    await terminal.until_shown("dashboard: http://127.0.0.1:")
    await host.enqueue(1)
    await terminal.until_shown("default: spawn 1: 1 queued")
    await terminal.until_shown(" is active")
    assert '{"' not in terminal.shown.replace("""'{"prompt": "lighthouse"}'""", ""), "no JSON"
    os.kill(terminal.pid, signal.SIGINT)
    await terminal.until_shown("stopped")
    await terminal.until_ended()


async def test_login_link_at_the_terminal_opens_one_session(host: FleetHost) -> None:
    terminal = Terminal(host, "--port", "0")
    await terminal.until_shown("dashboard: http://127.0.0.1:")
    await until(lambda: terminal.has("\n") and LOGIN_LINK.search(terminal.shown), f"a login link\n{terminal.shown}")
    (link,) = LOGIN_LINK.findall(terminal.shown)
    async with httpx.AsyncClient(base_url=link.partition("/login")[0], timeout=30) as browser:
        assert (await browser.get("/api/v1/workers")).status_code == 401
        assert (await browser.get(link)).status_code == 200
        assert (await browser.get("/api/v1/workers")).status_code == 200
    async with httpx.AsyncClient(timeout=30) as other:
        assert (await other.get(link)).status_code == 410
    events = (await host.store.audit_page()).rows
    assert [(event.code, event.actor) for event in events] == [
        ("SESSION_OPENED", "session:dashboard"),
        ("LINK_CREATED", os_actor()),
    ]
    os.kill(terminal.pid, signal.SIGINT)
    await terminal.until_ended()


async def test_login_link_that_is_switched_off_is_neither_made_nor_printed(host: FleetHost) -> None:
    terminal = Terminal(host, "--port", "0", WINDLASS_API__LOGIN_LINK="false")
    await terminal.until_shown("`windlass tokens link` prints a login link")
    assert await host.store.sessions() == []
    os.kill(terminal.pid, signal.SIGINT)
    await terminal.until_shown("stopped")
    assert "dashboard: http://127.0.0.1:" in terminal.shown
    assert "wll_" not in terminal.shown
    await terminal.until_ended()


async def test_up_warns_while_reading_needs_no_login(host: FleetHost) -> None:
    terminal = Terminal(host, "--port", "0", WINDLASS_API__OPEN_READING="true")
    await terminal.until_shown("answer reads without login")
    await terminal.until_shown("dashboard: http://127.0.0.1:")
    os.kill(terminal.pid, signal.SIGINT)
    await terminal.until_ended()


async def test_closing_the_terminal_ends_up_like_sigterm(host: FleetHost) -> None:
    host.configure(min_workers=1)
    terminal = Terminal(host)
    await host.until_workers(1)
    terminal.close()
    await terminal.until_ended()
    assert host.live_processes() == []
    assert await host.store.workers() == []


async def test_up_with_nohup_survives_its_terminal(host: FleetHost) -> None:
    host.configure(min_workers=1)
    terminal = Terminal(host, is_started_with_nohup=True)
    (worker,) = await host.until_workers(1)
    terminal.close()
    host.configure(min_workers=2)
    # The kernel's signal at the end of the terminal, or this one, reloads.
    os.kill(terminal.pid, signal.SIGHUP)
    assert worker.id in {each.id for each in await host.until_workers(2)}
    os.kill(terminal.pid, signal.SIGTERM)
    await terminal.until_ended()


async def test_reload_command_reaches_the_leader(host: FleetHost) -> None:
    host.configure(min_workers=1)
    up = host.up()
    await host.until_workers(1)
    host.configure(min_workers=2)
    done = host.windlass("reload")
    assert done.out == f"`windlass up` with pid {up.pid} reloads its configuration; its log says what changed\n", done
    await host.until_workers(2)
    assert host.windlass("reload", "--json").json["pid"] == up.pid
    await host.stop(up)
    ended = host.windlass("reload")
    assert (ended.code, ended.err) == (
        2,
        "windlass: no running `windlass up` was found in this database: start it, or check --data-dir.\n",
    )


async def test_hangup_and_reload_do_not_end_a_running_cycle(host: FleetHost, dsn: str) -> None:
    host.configure(min_workers=1, lease_s=120)
    blocker = await asyncpg.connect(dsn)
    await blocker.execute("begin; lock table windlass.cycles in access exclusive mode")
    cycle = host.windlass.start("cycle", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    await until(host.store.leader, "the cycle's lease")
    refused = host.windlass("reload")
    assert (refused.code, refused.err) == (
        2,
        "windlass: no running `windlass up` was found in this database. The process with pid "
        f"{cycle.pid} on host {socket.gethostname()} leads: a `windlass cycle`, which reads its configuration at each "
        "start, or an `up` that has ended.\n",
    )
    cycle.send_signal(signal.SIGHUP)
    assert cycle.poll() is None
    await blocker.close()
    out, err = await asyncio.to_thread(cycle.communicate, timeout=PATIENCE_S)
    assert cycle.returncode == 0, err
    assert json.loads(out)["actions"]["workers_spawned"] == 1
    loaded = next(line for line in map(json.loads, err.splitlines()) if line["event"] == "loaded configuration")
    assert loaded["settings"]["fleets.default.min_workers"] == {"value": 1, "source": "windlass.toml"}


async def test_reload_reaches_up_while_a_cycle_leads(host: FleetHost, dsn: str) -> None:
    host.configure(min_workers=1)
    up = host.up()
    await host.until_workers(1)
    connection = await asyncpg.connect(dsn)
    holder = f"{socket.gethostname()}-{os.getpid()}-abc"
    await connection.execute(
        "update windlass.leases set holder = $1, ttl_s = 600, expires_at = windlass.now() + '5 minutes'", holder
    )
    assert await host.store.leader() == holder
    host.configure(min_workers=2)
    assert host.windlass("reload", "--json").json["pid"] == up.pid
    await until(lambda: "reloaded configuration" in host.log(), f"the reload\n{host.log()}")
    await connection.execute("update windlass.leases set expires_at = windlass.now()")
    await connection.close()
    # A standby stops without its workers.
    await host.until_workers(2)
    await host.stop(up)


async def test_reload_names_processes_of_up_that_it_cannot_signal(host: FleetHost, dsn: str) -> None:
    connection = await asyncpg.connect(dsn)

    async def record(where: str, pid: int) -> None:
        await connection.execute(
            "insert into windlass.processes (id, kind, number, host, pid, version) values"
            " (gen_random_uuid(), 'control', 0, $1, $2, '1')",
            where,
            pid,
        )

    await record("elsewhere", 7)
    refused = host.windlass("reload")
    assert refused.err == "windlass: `windlass up` runs on host elsewhere with pid 7: run `windlass reload` there.\n"
    await record("elsewhere", 8)
    refused = host.windlass("reload")
    assert "2 processes of `windlass up` use this database, and none of them is the leader" in refused.err
    # The record of a killed process stays for some seconds.
    await connection.execute("delete from windlass.processes")
    await record(socket.gethostname(), os.getpid())
    ended = host.windlass("reload")
    assert (ended.code, f"`windlass up` with pid {os.getpid()} has ended" in ended.err) == (2, True)
    await connection.close()


async def test_second_up_names_the_first(host: FleetHost) -> None:
    first = host.up("--port", "0")
    await until(lambda: '"started server"' in host.log(), f"a server\n{host.log()}")
    port = host.log().partition('"port": ')[2].partition(",")[0]
    refused = host.windlass("up", "--port", port)
    assert refused.code == 2
    assert refused.err.splitlines()[-1] == (
        f"windlass: cannot listen on 127.0.0.1 port {port}: `windlass up` with pid {first.pid} listens there. "
        "Stop it, or choose another --port."
    )
    second = host.up("--port", "0")
    await until(lambda: "standby: pid " in host.log(), f"the leader's pid\n{host.log()}")
    assert f" (dashboard: http://127.0.0.1:{port}) leads" in host.log()
    leader = int(host.log().partition("standby: pid ")[2].split()[0])
    assert leader == first.pid or psutil.Process(leader).ppid() == first.pid
    await until(lambda: "once this process leads, " in host.log(), f"what a standby would serve\n{host.log()}")
    assert "give them another database (--data-dir FOLDER)" in host.log()
    second.terminate()
    await until(lambda: second.poll() is not None, "the end of the second")
    await host.stop(first)
