"""Replay the simulation of a seed and print its trace: `PYTHONPATH=tests python -m support.simulator --seed 7`."""

import argparse
import sys

from support.simulator.invariants import InvariantViolation
from support.simulator.shrinking import Injection
from support.simulator.worlds import WORLDS, make_simulation


def main() -> int:
    parser = argparse.ArgumentParser(prog="PYTHONPATH=tests python -m support.simulator", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--world", choices=WORLDS, default="plain")
    parser.add_argument("--until", type=float, help="end the faults at this virtual time in seconds")
    parser.add_argument("--only", help="inject only the faults with these keys, separated by commas")
    options = parser.parse_args()
    only = None if options.only is None else tuple(options.only.split(","))
    simulation = make_simulation(options.world, options.seed, Injection(only, options.until))
    result, is_violated = "every invariant held", False
    try:
        simulation.run()
    except InvariantViolation:
        result, is_violated = simulation.violations[0], True
    sys.stdout.write(f"{simulation.trace.text(limit=None)}\n\n{options.world} {options.seed}: {result}\n")
    return int(is_violated)


if __name__ == "__main__":
    sys.exit(main())
