import pytest
from emulated_account import AccountUnderTest
from emulated_project import ProjectUnderTest

import hetzner_contract
import runpod_contract


@pytest.fixture
def project() -> ProjectUnderTest:
    return ProjectUnderTest(hetzner_contract.Contract.find_or_none())


@pytest.fixture
def account() -> AccountUnderTest:
    return AccountUnderTest(runpod_contract.Contract.find_or_none())
