"""`windlass demo`: autoscaling, crash recovery and billing on this host, with a report of what happened.

`scenario.py` runs every demo. `local.py`, `hetzner.py`, `runpod.py` and `ray.py` hold what differs: the configuration,
the faults to inject, and what to check. `report.py` checks the results in the database and in the vendor's bill.
`environment.py` starts PostgreSQL and `windlass up`, `cleanup.py` removes everything afterwards.
"""
