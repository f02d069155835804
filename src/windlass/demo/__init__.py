"""`windlass demo`: what windlass promises, kept before your eyes.

Each arc (`local.py`, `hetzner.py`) says what happens and in which order; each report (`*_report.py`) what was promised
and whether it was kept, by what is in the database and on the bill. `stage.py` is what both stand on, `guard.py` tidies
up after them, `handlers.py` is what their workers run.
"""
