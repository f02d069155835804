"""Benchmarks: how fast Windlass is, beside its peers and beside the least that PostgreSQL itself would need."""
