"""What-if simulation: a fleet's policy on a trace of tasks, in virtual time.

engine.py has the world (arrivals, boots, claims, bills), fast_path.py and full_path.py the two ways to run a policy in
it, baselines.py the policies of other systems, optimum.py the cost that no policy without waiting can beat. Nothing
here reads a clock: the same trace, settings and seed give the same result. Faults of the control loop itself are
simulated elsewhere, by the fault simulator of the test suite.
"""
