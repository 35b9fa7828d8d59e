"""Ranks that wait for the tests of a file."""

import pytest

from reference_torch.rank_pool import RankPool
from tests.pipeline.support import PRELOAD


@pytest.fixture(scope="module")
def two():
    with RankPool(2, preload=PRELOAD) as pool:
        yield pool


@pytest.fixture(scope="module")
def three():
    with RankPool(3, preload=PRELOAD) as pool:
        yield pool


@pytest.fixture(scope="module")
def four():
    with RankPool(4, preload=PRELOAD) as pool:
        yield pool
