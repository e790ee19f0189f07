import pytest

from tests.support.decoder import trace_decoder


@pytest.fixture(scope="session")
def traced():
    """Unplanned forward and backward of a small decoder. Tests edit copies."""
    return trace_decoder()
