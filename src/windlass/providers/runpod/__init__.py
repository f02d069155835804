"""Workers on pods of Runpod.

`provider.py` implements the provider contract for one fleet; `pod_list.py` lists its pods. `account.py` is shared by
all fleets with one key: REST v2 over httpx, rate limited (`limiter.py`). `errors.py` classifies failed requests,
`naming.py` tags pods and builds requests, `catalog.py` reads prices and stock. `provisioning.py` checks a pod and
starts its worker over `ssh.py`; `doctor_checks.py` serves `windlass doctor`.
"""
