"""Applies deliberate defects (mutants) one by one to a copy of the tree and runs the tests that should notice each.

The lists are the TOML files of this folder, one per subject. A mutant has a name, a file, the exact old text (it must
occur once), the new text, and the tests that should fail, quickest first. A mutant is caught if one of its tests fails;
a test that cannot start makes the mutant invalid. Survivors, invalid mutants and timeouts fail the run.

The tree itself is never changed. A run that hangs is killed with every process that it started.

    python tools/mutants/run.py [--only NAME]... [--jobs N] [--skip-baseline] [--write PAGE]
"""

import argparse
import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
LISTS = Path(__file__).resolve().parent
# A test ends after this time, the whole run of a mutant after the other. Generous: the machine may be busy.
TEST_LIMIT_S = 100
RUN_LIMIT_S = 240
BASELINE_LIMIT_S = 1800
# The goal: this share of the mutants is caught by a test that takes less than this time.
QUICK_S = 15.0
QUICK_SHARE = 0.9
PAGE_HEAD = """# Mutants

`make mutants` applies each of these deliberate defects to a copy of the tree and runs the tests that should notice it.
The lists are in `tools/mutants/`.
The seconds are those of the test that failed, with its fixtures.
"""


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    subject: str

    def problem(self, root: Path) -> str | None:
        """Why it does not apply to this tree. None if it does."""
        path = root / self.file
        if not path.is_file():
            return f"{self.name}: {self.file} not found"
        if (count := path.read_text().count(self.old)) != 1:
            return f"{self.name}: its old text occurs {count} times in {self.file}"
        if self.old == self.new:
            return f"{self.name}: old and new text are the same"
        missing = [test for test in self.tests if not (root / test.split("::")[0]).is_file()]
        return f"{self.name}: test file of {missing[0]} not found" if missing else None


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    # caught, survived, invalid, timed out
    outcome: str
    test: str = ""
    test_s: float = 0.0
    detail: str = ""


@dataclass(frozen=True)
class TestRun:
    is_timeout: bool
    failed: str | None
    failed_s: float
    is_valid: bool
    output: str


def load_mutants() -> list[Mutant]:
    found = []
    for path in sorted(LISTS.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["mutant"]:
            tests = tuple(entry.pop("tests"))
            found.append(Mutant(**entry, tests=tests, subject=path.stem.replace("_", " ")))
    return found


def problems(mutants: Iterable[Mutant], root: Path) -> list[str]:
    mutants = list(mutants)
    names = [mutant.name for mutant in mutants]
    repeated = sorted({name for name in names if names.count(name) > 1})
    found = [f"{name}: the name is used twice" for name in repeated]
    return found + [problem for mutant in mutants if (problem := mutant.problem(root)) is not None]


# ---------------------------------------------------------------------------------------------------------- test runs


def copy_tree(target: Path) -> None:
    """Tracked files, and untracked ones that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, timeout=60,
    ).stdout.decode()  # fmt: skip
    for name in filter(None, listed.split("\0")):
        source, copy = ROOT / name, target / name
        if source.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy)


@contextlib.contextmanager
def applied(mutant: Mutant, tree: Path) -> Iterator[None]:
    path = tree / mutant.file
    before = path.read_text()
    path.write_text(before.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        path.write_text(before)


def run_tests(tree: Path, tests: Iterable[str], limit_s: float, options: Iterable[str] = ()) -> TestRun:
    # A short path: PostgreSQL's socket is below it.
    temporary = Path(tempfile.mkdtemp(prefix="mutant-"))
    temporary.chmod(0o755)
    report = temporary / "report.xml"
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line"),
        *(f"--timeout={TEST_LIMIT_S}", f"--junitxml={report}", *options, *tests),
    ]
    environment = os.environ | {
        "PYTHONPATH": str(tree / "src"),
        # A stale bytecode file would hide a change of the same size in the same second.
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(temporary),
    }
    with (temporary / "output").open("w+") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(limit_s)
            is_timeout = False
        except subprocess.TimeoutExpired:
            is_timeout = True
        finally:
            kill_all(process, temporary)
        output.seek(0)
        text = output.read()
    try:
        failed, failed_s, is_valid = read_report(report)
    except (OSError, ElementTree.ParseError):
        failed, failed_s, is_valid = None, 0.0, False
    shutil.rmtree(temporary, ignore_errors=True)
    return TestRun(is_timeout, failed, failed_s, is_valid, text)


def kill_all(process: subprocess.Popen[bytes], temporary: Path) -> None:
    """Kill the run's process group, its descendants, and processes that work below its temporary folder."""
    doomed: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        doomed += psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for other in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if other.cwd().startswith(f"{temporary}/"):
                doomed.append(other)
    for other in doomed:
        with contextlib.suppress(psutil.Error):
            other.kill()


def read_report(report: Path) -> tuple[str | None, float, bool]:
    """The first failed test and its seconds; and whether any test ran without an error of its fixtures."""
    cases = list(ElementTree.parse(report).iter("testcase"))  # noqa: S314  # pytest wrote it
    for case in cases:
        if case.find("failure") is not None:
            path = case.get("classname", "").replace(".", "/")
            return f"{path}.py::{case.get('name')}", float(case.get("time", 0)), True
    is_valid = bool(cases) and all(case.find("error") is None for case in cases)
    # All skipped: nothing was tested.
    return None, 0.0, is_valid and any(case.find("skipped") is None for case in cases)


def judge(mutant: Mutant, tree: Path) -> Verdict:
    with applied(mutant, tree):
        run = run_tests(tree, mutant.tests, RUN_LIMIT_S, ["-x"])
    if run.failed is not None:
        return Verdict(mutant, "caught", run.failed, run.failed_s)
    tail = "\n".join(run.output.splitlines()[-15:])
    if run.is_timeout:
        return Verdict(mutant, "timed out", detail=tail)
    return Verdict(mutant, "survived" if run.is_valid else "invalid", detail=tail)


# ------------------------------------------------------------------------------------------------------------- report


def table(verdicts: list[Verdict]) -> str:
    lines = ["| subject | mutant | caught by | seconds |", "| --- | --- | --- | ---: |"]
    for verdict in verdicts:
        test = verdict.test.removeprefix("tests/") if verdict.outcome == "caught" else verdict.outcome.upper()
        lines.append(f"| {verdict.mutant.subject} | {verdict.mutant.name} | `{test}` | {verdict.test_s:.1f} |")
    return "\n".join(lines)


def summary(verdicts: list[Verdict]) -> str:
    caught = [verdict for verdict in verdicts if verdict.outcome == "caught"]
    quick = sum(verdict.test_s < QUICK_S for verdict in caught)
    return f"{len(caught)} of {len(verdicts)} caught, {quick} of them by a test that takes less than {QUICK_S:.0f} s."


def run_all(mutants: list[Mutant], jobs: int, is_baseline_skipped: bool) -> list[Verdict]:
    pending: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in mutants:
        pending.put(mutant)
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [Path(folder) / str(number) for number in range(jobs)]
        for tree in trees:
            copy_tree(tree)
        if not is_baseline_skipped:
            check_baseline(trees[0], mutants, jobs)

        def work(tree: Path) -> None:
            while True:
                try:
                    mutant = pending.get_nowait()
                except queue.Empty:
                    return
                verdict = judge(mutant, tree)
                verdicts.append(verdict)
                print(f"{verdict.outcome:9} {verdict.test_s:6.1f} s  {mutant.name}  {verdict.test}", flush=True)

        threads = [threading.Thread(target=work, args=[tree]) for tree in trees]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    order = {mutant.name: number for number, mutant in enumerate(mutants)}
    return sorted(verdicts, key=lambda verdict: order[verdict.mutant.name])


def check_baseline(tree: Path, mutants: list[Mutant], jobs: int) -> None:
    """A test that fails without a mutant would catch every mutant."""
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    print(f"run {len(tests)} named tests without a mutant", flush=True)
    run = run_tests(tree, tests, BASELINE_LIMIT_S, ["-n", str(jobs)])
    if run.is_timeout or run.failed is not None or not run.is_valid:
        sys.exit(f"tests fail without a mutant: {run.failed}\n{run.output[-3000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description="apply deliberate defects and run the tests that should notice")
    parser.add_argument("--only", action="append", metavar="NAME", help="a mutant by name; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default 2)")
    parser.add_argument("--skip-baseline", action="store_true", help="do not run the tests without a mutant first")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the table to this Markdown file")
    arguments = parser.parse_args()
    mutants = load_mutants()
    if found := problems(mutants, ROOT):
        print("\n".join(found))
        return 2
    if arguments.only:
        unknown = set(arguments.only) - {mutant.name for mutant in mutants}
        if unknown:
            print(f"mutant not found: {', '.join(sorted(unknown))}")
            return 2
        mutants = [mutant for mutant in mutants if mutant.name in arguments.only]
    started = time.monotonic()
    verdicts = run_all(mutants, max(1, min(arguments.jobs, 16)), arguments.skip_baseline)
    text = f"{summary(verdicts)}\nLast run: {datetime.now(UTC):%Y-%m-%d}, {time.monotonic() - started:.0f} s."
    print(f"\n{table(verdicts)}\n\n{text}")
    failures = [verdict for verdict in verdicts if verdict.outcome != "caught"]
    for verdict in failures:
        print(f"\n{verdict.mutant.name}: {verdict.outcome}\n{verdict.detail}")
    if arguments.write is not None:
        arguments.write.write_text(f"{PAGE_HEAD}\n{text}\n\n{table(verdicts)}\n")
    quick = sum(verdict.test_s < QUICK_S for verdict in verdicts if verdict.outcome == "caught")
    is_slow = quick < QUICK_SHARE * len(verdicts)
    if is_slow:
        print(f"fewer than {QUICK_SHARE:.0%} are caught by a test that takes less than {QUICK_S:.0f} s")
    return 1 if failures or is_slow else 0


if __name__ == "__main__":
    sys.exit(main())
