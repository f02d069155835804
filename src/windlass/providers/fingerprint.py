"""Short hashes that identify a secret or a database without revealing it."""

import hashlib


def fingerprint(*parts: str) -> str:
    """16 hex digits of SHA-256. API keys are long and random, so they cannot be guessed from it."""
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]
