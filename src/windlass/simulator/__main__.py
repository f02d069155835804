"""Tell the story of a seed again: `python -m windlass.simulator --seed 7`."""

import argparse
import sys

from windlass.simulator.invariants import InvariantViolation
from windlass.simulator.scenario import draw_billed_scenario, draw_scenario
from windlass.simulator.simulation import Simulation


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m windlass.simulator", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--paid", action="store_true", help="where machines are paid by the started hour")
    arguments = parser.parse_args()
    simulation = Simulation((draw_billed_scenario if arguments.paid else draw_scenario)(arguments.seed))
    try:
        report = simulation.run()
    except InvariantViolation as error:
        sys.stdout.write(
            f"{simulation.trace.text(limit=None)}\n\nseed {arguments.seed} broke a promise: {error.args[0]}\n"
        )
        return 1
    sys.stdout.write(f"{report.trace.text(limit=None)}\n\nseed {arguments.seed} kept every promise\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
