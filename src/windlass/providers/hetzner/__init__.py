"""Workers on servers of Hetzner Cloud.

`provider.py` implements the provider contract for one fleet; `server_list.py` lists its servers. `account.py` is shared
by all fleets with one token: the vendor's SDK in threads, rate limited (`limiter.py`). `errors.py` classifies failed
requests, `naming.py` names and labels servers, `catalog.py` reads prices, `primary_ips.py` deletes orphaned addresses,
`doctor_checks.py` serves `windlass doctor`.
"""
