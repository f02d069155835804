"""A database that cannot be used: one sentence that says what to do, and no secret."""

import socket
import ssl

import asyncpg
import pytest

from windlass.store.connection import unavailable

DSN = "postgresql://app:hunter2@db.example.com:6543/app"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        pytest.param(
            socket.gaierror(-2, "Name or service not known"),
            "connecting: the host name of the database, db.example.com:6543, cannot be resolved. Check DATABASE_URL.",
            id="no such host",
        ),
        pytest.param(
            ConnectionError('PostgreSQL server at "db.example.com:6543" rejected SSL upgrade'),
            "the TLS connection to the database",
            id="a server without TLS",
        ),
        pytest.param(
            ssl.SSLCertVerificationError("certificate verify failed"), "Check sslmode", id="unknown certificate"
        ),
        pytest.param(
            asyncpg.InvalidAuthorizationSpecificationError('no pg_hba.conf entry for host "::1", no encryption'),
            "accepts only encrypted connections. Add sslmode=require to DATABASE_URL.",
            id="a server that wants TLS",
        ),
        pytest.param(
            asyncpg.InvalidPasswordError("password authentication failed"),
            "refused the user or password",
            id="password",
        ),
        pytest.param(
            asyncpg.DiskFullError("could not extend file"),
            "the disk of the database at db.example.com:6543 is full. Free space on its host.",
            id="full disk",
        ),
        pytest.param(ConnectionRefusedError(111, "refused"), "cannot be reached", id="connection refused"),
    ],
)
def test_error_names_its_cause(error: BaseException, sentence: str) -> None:
    message = str(unavailable("connecting", DSN, error))
    assert sentence in message
    assert message.startswith("connecting: ")
    assert message.endswith((".", "?"))
    assert "hunter2" not in message
