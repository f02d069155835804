"""Cost of workers and tasks: settlement, estimates, reports. Pure functions; the store reads and writes the ledger."""
