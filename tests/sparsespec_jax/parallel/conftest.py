"""What one device emits, for all that is to emit the same."""

import pytest

from tests.sparsespec_jax.parallel.test_tensor_parallel import PLAIN, make_engine, outputs


@pytest.fixture(scope="session")
def expected() -> list[dict]:
    """Plain decoding of `prompts_and_params`."""
    return outputs(make_engine(1, PLAIN))
