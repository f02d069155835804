"""How a key is told from another without being told."""

import hashlib


def fingerprint(endpoint: str, key: str) -> str:
    """The same for the same key at the same place. A key is long and random: nobody guesses it from this."""
    return hashlib.sha256(f"{endpoint} {key}".encode()).hexdigest()[:16]
