from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.api_fixture import ApiFixture, open_api


@pytest.fixture
async def api(dsn: str, clock: Any) -> AsyncIterator[ApiFixture]:
    async with open_api(dsn, clock) as api:
        yield api
