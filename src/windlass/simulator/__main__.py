"""Replay the simulation of a seed and print its trace: `python -m windlass.simulator --seed 7`."""

import argparse
import sys

from windlass.simulator.invariants import InvariantViolation
from windlass.simulator.scenario import draw_billed_scenario, draw_scenario
from windlass.simulator.simulation import Simulation


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m windlass.simulator", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--billed", action="store_true", help="bill machines by started periods of 5 to 60 minutes")
    arguments = parser.parse_args()
    simulation = Simulation((draw_billed_scenario if arguments.billed else draw_scenario)(arguments.seed))
    result, is_violated = "every invariant held", False
    try:
        simulation.run()
    except InvariantViolation:
        result, is_violated = simulation.violations[0], True
    sys.stdout.write(f"{simulation.trace.text(limit=None)}\n\nseed {arguments.seed}: {result}\n")
    return int(is_violated)


if __name__ == "__main__":
    sys.exit(main())
