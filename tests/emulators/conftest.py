import pytest

from support import hetzner_contract, runpod_contract
from support.emulated_account import AccountUnderTest
from support.emulated_project import ProjectUnderTest


@pytest.fixture
def project() -> ProjectUnderTest:
    return ProjectUnderTest(hetzner_contract.Contract.find_or_none())


@pytest.fixture
def account() -> AccountUnderTest:
    return AccountUnderTest(runpod_contract.Contract.find_or_none())
