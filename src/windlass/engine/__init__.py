"""Ray as the engine of a fleet: tasks are claimed by a dispatcher and placed by Ray on whatever the fleet has hired.

`dispatcher.py` holds the lease and runs the fleet's claims; `executor.py` sees one attempt through Ray; `gate.py` is
where an attempt reports, from the node it was placed on, before it may begin; `attempt.py` is what runs there.
`node.py` is the program of a hired machine: it joins the cluster and beats. `head.py` is a head of our own.
`needs.py` and `room.py` are pure. Only `cluster.py`, `driver.py` and `attempt.py` import ray, which is an extra.
"""
