"""Examples at the end of `--help`, by command. A test parses each of them."""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "windlass": (
        "windlass demo",
        "windlass up --queue renders --handler app:generate --port 8080",
        """windlass enqueue renders '{"prompt": "lighthouse"}'""",
        "windlass status --watch",
        "windlass explain 1",
    ),
    "up": (
        "windlass up                     # the fleets in ./windlass.toml",
        "windlass up --queue renders --handler app:generate --max 8 --port 8080",
        "windlass up --queue mails --exec ./send-mail --min 1",
        "windlass up --leave-workers     # before an upgrade: Ctrl-C keeps the workers",
    ),
    "serve": ("windlass serve --port 8080", "windlass serve --config /etc/windlass.toml"),
    "reload": ("windlass reload", "windlass reload --config /etc/windlass.toml"),
    "worker": (
        "windlass worker --queue renders --handler app:generate",
        "windlass worker --queue renders --exec ./render.sh --concurrency 4",
    ),
    "cycle": ("windlass cycle --config /etc/windlass.toml",),
    "demo": ("windlass demo", "windlass demo --on hetzner --keep"),
    "enqueue": (
        """windlass enqueue renders '{"prompt": "lighthouse"}'""",
        """windlass enqueue renders '{"order": 4711}' --unique-key order-4711 --priority 10""",
        "windlass enqueue renders '{}' --run-after 2h",
        "windlass enqueue renders --file prompts.jsonl",
    ),
    "tasks": (
        "windlass tasks list --queue renders --status failed",
        "windlass tasks list --search lighthouse",
        "windlass tasks errors --search CUDA --since 1h",
        "windlass tasks show 17",
        "windlass tasks retry --all-failed --queue renders",
        "windlass tasks cancel --all-queued --queue renders",
        "windlass tasks purge --status complete --older-than 7d",
    ),
    "status": ("windlass status --watch", "windlass status --queue renders --json"),
    "workers": ("windlass workers list", "windlass workers logs default-0-2c551d8930 --follow"),
    "spawn": ("windlass spawn gpus --count 2",),
    "terminate": ("windlass terminate gpus-0-2c551d8930", "windlass terminate --fleet gpus --force"),
    "pause": ("windlass pause gpus", "windlass pause --all"),
    "resume": ("windlass resume gpus", "windlass resume --all"),
    "deploy": (
        "windlass deploy gpus                    # new code or settings, one worker at a time",
        "windlass deploy gpus --surge 3          # three additional workers at a time",
        "windlass deploy gpus --max-unavailable 2 --now",
        "windlass deploy gpus --status",
        "windlass deploy gpus --abort",
    ),
    "restart": (
        "windlass restart gpus       # after a failure was fixed",
        "windlass restart gpus --slot 2",
    ),
    "runbook": ("windlass runbook WORKER_LOST",),
    "explain": (
        "windlass explain 17                     # why is task 17 still queued?",
        "windlass explain gpus                   # what did fleet gpus decide, and why?",
        "windlass explain gpus-0-2c551d8930      # why was this worker terminated?",
    ),
    "replay": ("windlass replay 42 --set max_workers=8", "windlass replay 42 --with new.toml"),
    "simulate": (
        "windlass simulate --trace week.csv --policy adaptive --policy keda --billing hour",
        "windlass simulate --fleet gpus --since 7d --policy adaptive --policy adaptive:wait_goal_s=30",
        "windlass simulate --fleet gpus --shadow --report what-if.html",
        "windlass simulate --generate bursts --boot 60 --set price_of_waiting=1 --report what-if.html",
    ),
    "tune": (
        "windlass tune --trace week.csv --slo p95_wait=60s --boot 90 --billing hour",
        "windlass tune --fleet gpus --slo p95_wait=60s --write fleet.toml",
        "windlass tune --trace week.csv --price-of-waiting 1 --write fleet.toml",
    ),
    "cost": ("windlass cost --by queue --since 30d", "windlass cost --by task --fleet gpus --json"),
    "init": (
        "windlass init",
        "windlass init renders --yes",
        "windlass init --provider hetzner --url https://windlass.example.com --budget 5 --yes --deploy systemd",
    ),
    "doctor": ("windlass doctor", "windlass doctor --config /etc/windlass.toml"),
    "config": ("windlass config show", "windlass config show --json"),
    "db": ("windlass db migrate", 'psql "$(windlass db url)"', "windlass db roles", "windlass db roles --sql"),
    "tokens": ("windlass tokens create ci --role producer", "windlass tokens link --role viewer"),
    "audit": ("windlass audit", "windlass audit --json"),
    "bootstrap": ("windlass bootstrap render --fleet gpus",),
    "emulate": ("windlass emulate hetzner --port 8081",),
    "ray": ("windlass ray dispatch --fleet renders",),
}


def help_epilog(command: str) -> str | None:
    """The examples of a command as click prints them, each on a line of its own."""
    lines = EXAMPLES.get(command, ())
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines) if lines else None
