"""The store in memory: the contracts of the PostgreSQL stores without PostgreSQL, for simulations and quick tests.

One event loop, one process, nothing outlives it. Time comes only from a clock, which must not run backwards, and
chance only from a generator: the same calls at the same times give the same answers. A claim or a finish costs the
logarithm of what waits, however much has been finished. Each call is a transaction of its own: it happens at once and
whole, or raises and changes nothing.

To be read in this order:

    interval.py   durations as PostgreSQL counts them
    tasks.py      a task's row, and the table: by queue, by who runs it, by when it ended
    workers.py    a worker's row, and the table: where a life may go, who is lost
    fleets.py     fleets, their slots, and the leases of those who lead them
    journal.py    what happened, and how a failed attempt is told
    bell.py       who waits for work
    ledger.py     bills, what was done meanwhile, and what it cost
    cycles.py     the record of the control loop
    tables.py     all of these, and the steps that tasks and workers take through several of them
    retention.py  what is forgotten, and when
    checks.py     what the tables' constraints refuse

    store.py      MemoryStore: producers, workers, people who look
    observe.py    a snapshot, as a function of rows
    actions.py    what a plan decided, as far as no provider is needed
    outcomes.py   what providers did
    control.py    MemoryControlStore: the control loop, and what people do to fleets
    access.py     MemoryAccessStore: who may call over HTTP
    engine.py     MemoryEngineStore: dispatchers and their nodes

Each store adds the methods of its contract to the one before and changes none: all of them have all tables, as every
PostgreSQL store has the whole schema. The SQL in migrations/ says what is right. Where it leaves an order open (which
of a leaving worker's tasks goes back first), this store goes by id. tests/conformance runs one suite and the same
random histories over both.
"""
