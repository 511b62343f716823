"""What tests share, one file per topic. Test files import from here, never from each other. Fixtures: conftest.py."""

import pytest

# What these assert is explained as in a test.
pytest.register_assert_rewrite("helpers.programs", "helpers.reference_forward")
