import gc

import pytest

from datasvc.trainer.fast_imports import fast_imports


def test_collection_is_paused_inside_and_goes_on_after_an_error_too():
    with pytest.raises(ImportError), fast_imports():
        with fast_imports():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_a_program_that_does_not_collect_garbage_still_does_not_afterwards():
    gc.disable()
    try:
        with fast_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
