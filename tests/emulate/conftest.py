import pytest
from emulated_project import ProjectUnderTest

from hetzner_contract import Contract


@pytest.fixture
def project() -> ProjectUnderTest:
    return ProjectUnderTest(Contract.find_or_none())
