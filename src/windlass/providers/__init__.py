"""Who rents us machines: one module per provider, all of them keeping the contract of `ports/provider.py`."""
