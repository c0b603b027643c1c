"""`labkit.launch.loading`: no collections during imports, nor of what these made."""

import gc
import importlib

import pytest

from labkit.launch.loading import loading


@pytest.fixture(autouse=True)
def _as_before():
    was_on = gc.isenabled()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as conftest.py left it: what was collected is not walked again
    (gc.enable if was_on else gc.disable)()


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_off_inside_and_as_before_afterward_also_when_nested(was_on):
    (gc.enable if was_on else gc.disable)()
    with loading():
        with loading():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() == was_on


def test_the_collector_is_on_again_after_an_import_that_failed():
    gc.enable()
    with pytest.raises(ModuleNotFoundError), loading():
        importlib.import_module("no_such_module")
    assert gc.isenabled()


def test_what_was_loaded_is_not_walked_again():
    with loading():
        loaded = [[]]
    assert all(one is not loaded for one in gc.get_objects())
    gc.unfreeze()
    assert any(one is loaded for one in gc.get_objects())
