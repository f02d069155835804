"""Tell the story of a seed again: `python -m windlass.simulator --seed 7`."""

import argparse
import sys

from windlass.simulator.invariants import InvariantViolation
from windlass.simulator.scenario import draw, draw_paid
from windlass.simulator.world import World


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m windlass.simulator", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--paid", action="store_true", help="where machines are paid by the started hour")
    arguments = parser.parse_args()
    world = World((draw_paid if arguments.paid else draw)(arguments.seed))
    try:
        report = world.run()
    except InvariantViolation as error:
        sys.stdout.write(f"{world.story.text(limit=None)}\n\nseed {arguments.seed} broke a promise: {error.args[0]}\n")
        return 1
    sys.stdout.write(f"{report.story.text(limit=None)}\n\nseed {arguments.seed} kept every promise\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
