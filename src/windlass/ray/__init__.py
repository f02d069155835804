"""Runs tasks of fleets with `engine = "ray"`: a dispatcher claims them, Ray places them on nodes.

A *seat* is a Ray task that runs attempts one after another. Ray places seats; the dispatcher decides which attempt runs
in a seat that has started. One dispatcher per fleet acts at a time.

    windlass up (one process)                 dispatcher (one process per fleet)
    +---------------------------------+       +------------------------------------------------------+
    | supervisor.py    keeps programs | start | dispatcher.py        wires the parts, claims tasks   |
    |                  running        |------>|   dispatcher_lease.py  one acts, others are standbys |
    | head.py          runs a head    |       |   runtime_group.py     worker runtimes, one per kind |
    | head_lease.py    one head per   |       |     executor.py          one attempt                 |
    |                  database       |       |       seat_pool.py         attempts wait for seats   |
    | probe.py         asks a head    |       |         wait_list.py, seat_state.py                  |
    |                  for versions   |       |         placement_writer.py  assigns tasks to nodes  |
    +---------------------------------+       |         driver.py            submits and kills seats |
        | starts           | provider         |   seat_server.py       connections of seats          |
        v                  | spawns           |   node_watch.py        observes, reports, drains     |
    +--------------+       |                  |     cluster.py, node_table.py, capacity.py           |
    | Ray head     |       |                  +------------------------------------------------------+
    | (GCS)        |<------|------ lists and drains nodes, -------+            ^
    +--------------+       |       submits seats                               | TCP, wire_protocol.py
        ^                  v                                                   |
        | joins   +--------------------------------------------------------------------------------+
        +---------| node: node.py joins the machine to the cluster and sends its heartbeats        |
                  |       seat_process.py runs in Ray's processes: connects to the seat server and |
                  |       runs the handler or the command                                          |
                  +--------------------------------------------------------------------------------+

capacity.py, resources.py, wait_list.py and wire_protocol.py are pure. Only cluster.py, driver.py and seat_process.py
import ray, which is an optional dependency. docs/ray.md describes the behaviour; decisions 14 and 16 give the reasons.
"""
