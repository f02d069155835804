"""Payloads and results that the server never sees in plain text: AES-256-GCM with a key of producers and workers.

    pip install cryptography
    export APP_PAYLOAD_KEY=$(python -c "import os; print(os.urandom(32).hex())")
    windlass up --queue letters --handler encrypted:count_words --chdir examples
    python examples/encrypted.py

The key is in the environment of the producer and of the fleet (`env`), and nowhere in Windlass.
"""

import os

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

import windlass

NONCE_BYTES = 12


class AesGcmCodec:
    """Encrypts with a random nonce per value. The context (queue or task) is authenticated."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def encode(self, data: bytes, context: bytes) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, data, context)

    def decode(self, data: bytes, context: bytes) -> bytes:
        return self._cipher.decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], context)


codec = AesGcmCodec(bytes.fromhex(os.environ["APP_PAYLOAD_KEY"]))


@windlass.sealed(codec)
def count_words(task: windlass.RunningTask) -> dict[str, int]:
    return {"words": len(task.payload["text"].split())}


if __name__ == "__main__":
    with windlass.SyncClient(codec=codec) as client:
        task_id = client.enqueue("letters", {"text": "for your eyes only"})
        print(client.result(task_id, timeout_s=60))
