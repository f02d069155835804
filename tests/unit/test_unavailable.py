"""A database that cannot be used: one sentence that says what to do, and no secret."""

import socket
import ssl

import asyncpg
import pytest

from windlass.store.connect import unavailable

DSN = "postgresql://app:hunter2@db.example.com:6543/app"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        pytest.param(
            socket.gaierror(-2, "Name or service not known"),
            "connecting: the name of the database's host, db.example.com:6543, is not known here: check DATABASE_URL.",
            id="no such host",
        ),
        pytest.param(
            ConnectionError('PostgreSQL server at "db.example.com:6543" rejected SSL upgrade'),
            "do not agree on TLS",
            id="a server without TLS",
        ),
        pytest.param(
            ssl.SSLCertVerificationError("certificate verify failed"), "check sslmode", id="a certificate of nobody's"
        ),
        pytest.param(
            asyncpg.InvalidAuthorizationSpecificationError('no pg_hba.conf entry for host "::1", no encryption'),
            "takes only encrypted connections: add sslmode=require to DATABASE_URL.",
            id="a server that wants TLS",
        ),
        pytest.param(
            asyncpg.InvalidPasswordError("password authentication failed"),
            "refused the user or password",
            id="password",
        ),
        pytest.param(ConnectionRefusedError(111, "refused"), "cannot be reached", id="nobody listens"),
    ],
)
def test_the_cause_is_named(error: BaseException, sentence: str) -> None:
    told = str(unavailable("connecting", DSN, error))
    assert sentence in told
    assert told.startswith("connecting: ")
    assert told.endswith((".", "?"))
    assert "hunter2" not in told
