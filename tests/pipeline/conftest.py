"""Ranks that wait for the tests of a file."""

import pytest

from reference_torch.rank_pool import RankPool


@pytest.fixture(scope="module")
def two():
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def three():
    with RankPool(3) as pool:
        yield pool


@pytest.fixture(scope="module")
def four():
    with RankPool(4) as pool:
        yield pool
