"""Ray as the engine of a fleet: tasks are claimed by a dispatcher and placed by Ray on whatever the fleet has hired.

`dispatcher.py` holds the lease and runs the fleet's claims; `executor.py` sees one attempt through Ray; `seats.py` has
the seats, Ray tasks that run attempts one after another, and says who sits where; `gate.py` is where a seat reports
from the node it was placed on, `line.py` what is said there, and `seat.py` what runs on the node.
`node.py` is the program of a hired machine: it joins the cluster and beats. `head.py` is a head of our own.
`needs.py`, `room.py`, `roster.py` and `line.py` are pure. Only `cluster.py`, `driver.py` and `seat.py` import ray,
which is an extra.
"""
