"""The stores in memory: the contracts of the PostgreSQL stores, for simulations and fast tests.

One event loop, one process, no persistence. Time comes only from a clock, which must not run backwards, and randomness
only from a generator: the same calls at the same times give the same answers. A claim or a completion costs the
logarithm of the queue's length. Each call is one transaction: it succeeds, or raises and changes nothing.

    tables.py        all tables, and the steps that change several of them
    task_store.py, transport.py, fleet_store.py, control.py, auth.py, ray.py: one store per port, over the tables
    stores.py        all of them in one object, for the simulator and tests

The SQL functions define the behaviour. Where they leave an order open, these stores go by id. tests/conformance runs
one suite and the same random histories over both.
"""
