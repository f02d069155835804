"""The fast path of the simulator decides as the full plan() does."""

from pathlib import Path

import pytest

from windlass.model.fleet import FleetConfig
from windlass.simulator.engine import World
from windlass.simulator.runs import RunRequest, run_policy
from windlass.simulator.trace import GENERATORS, GeneratorSettings, Trace, generate, read_trace

# Days of simulated time.
pytestmark = pytest.mark.slow

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
WORLDS = {
    "second": World(),
    "refused create calls": World(refused_share=0.6),
    "random boots": World(boot_sigma=0.5),
    "processes of this host": World(boot_s=1.0, is_free=True),
    "hour": World(slots=2, boot_s=90.0, billing_unit_s=3600),
}


def check(trace: Trace, world: World, **settings: object) -> None:
    values: dict[str, object] = {"max_workers": 500, "concurrency": world.slots, "spawn_timeout_s": 3600.0}
    config = FleetConfig(policy="adaptive", **(values | settings))
    fast, full = (
        run_policy(RunRequest("adaptive", config, world, is_full=is_full), trace).to_plain()
        for is_full in (False, True)
    )
    assert fast == full


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", GENERATORS)
def test_fast_path_equals_full_plan_on_generated_loads(kind: str, world: str) -> None:
    trace = generate(kind, GeneratorSettings(tasks=400, days=0.4, duration_s=90.0))
    check(trace, WORLDS[world])


def test_fast_path_equals_full_plan_within_limits() -> None:
    trace = generate("bursts", GeneratorSettings(tasks=300, days=0.3))
    check(trace, WORLDS["second"], max_workers=4, min_workers=1, max_changes_per_cycle=2, price_of_waiting=1.0)


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"no traces in {TRACES}")
@pytest.mark.parametrize("price", [None, 1.0])
@pytest.mark.parametrize("sigma", [0.0, 0.5])
@pytest.mark.parametrize("name", ["genai_image_a", "llm_code", "gpu_jobs_a", "grid_spikes_a", "hpc_mixed"])
def test_fast_path_equals_full_plan_on_samples_of_traces(name: str, sigma: float, price: float | None) -> None:
    """Long enough that a fleet starts from no workers when it knows boots and durations."""
    trace = read_trace(TRACES / f"{name}.csv.gz")
    # The full path takes time for each cycle, and these arrivals span days.
    arrivals = 100 if name == "gpu_jobs_a" else 250
    for world in (World(boot_sigma=sigma), World(slots=2, boot_s=90.0, billing_unit_s=3600, boot_sigma=sigma)):
        check(trace.between(0.0, trace.arrivals[arrivals]), world, price_of_waiting=price)


@pytest.mark.parametrize("price", [None, 1.0])
@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_fast_path_equals_full_plan_after_silence(sigma: float, price: float | None) -> None:
    """Cycles without workers and tasks are skipped, and the first spawn after them costs a billing hour."""
    trace = generate("bursts", GeneratorSettings(tasks=200, days=4.0, duration_s=400.0))
    check(trace, World(slots=2, boot_s=90.0, billing_unit_s=3600, boot_sigma=sigma), price_of_waiting=price)
