"""Benchmarks: Windlass compared with its peers and with a bare PostgreSQL baseline."""
