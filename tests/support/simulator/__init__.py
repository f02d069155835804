"""Runs the real control loop in virtual time against a simulated cloud, with injected faults, and checks invariants.

Real: FleetTask and FleetCycle, the planner and every policy, the executor, the leader lease, the store's rules for
workers, and in two worlds the provider of a vendor.
Simulated: time (loop.py), processes that can be killed or frozen (processes.py), the network to the database
(network.py), the cloud and its bill (cloud.py), and the programs on its machines (workers.py). The store is the memory
store. `Simulation` also accepts functions that make another store or provider; a vendor's emulator reports its machines
through `SimulatedCloud.add_machine` and `remove_machine`, so that the cloud's record stays the reference.

scenario.py draws all settings and fault rates of a run from its seed. simulation.py runs a scenario: first faults, then
none, until the fleets are at rest. invariants.py checks the promises of docs/architecture.md: most at every call that
concerns them, the tasks every five seconds, leaks and bills at the end.
crashes.py kills an orchestrator before, during or after any of its calls.

A seed always gives the same run. Replay one with its trace:
`PYTHONPATH=tests python -m support.simulator --seed 7`; `--world` names another of worlds.py.
"""
