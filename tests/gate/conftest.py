"""The ahead-of-time library that all tests of a session share."""

import pytest

from tests.aot.library import Built, build_once


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The library built from the manifest, for all architectures."""
    return build_once(tmp_path_factory)
