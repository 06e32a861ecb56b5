import pytest

import datasvc.trainer as hvd
from datasvc.errors import CorruptDataError, DatasvcError
from datasvc.trainer.recipes.rejoin import call_on_first_rank


@pytest.fixture
def told(monkeypatch):
    """What rank 0 has sent to the others."""
    messages, real = [], hvd.broadcast_object

    def broadcast_object(message, **options):
        messages.append(message)
        return real(message, **options)

    hvd.init()
    monkeypatch.setattr(hvd, "broadcast_object", broadcast_object)
    yield messages
    hvd.shutdown()


def test_the_answer_of_rank_0_reaches_all(told):
    assert call_on_first_rank(lambda: {"version": 3}, name="answer") == {"version": 3}
    assert told == [(None, {"version": 3})]


@pytest.mark.parametrize("error", [CorruptDataError("an entry is damaged"), OSError("the disk is gone")])
def test_what_rank_0_raises_is_told_to_the_others_before_it_is_raised(told, error):
    def question():
        raise error

    with pytest.raises(type(error) if isinstance(error, DatasvcError) else DatasvcError, match=str(error)):
        call_on_first_rank(question, name="error")
    assert told == [({"type": type(error).__name__, "message": str(error)}, None)]
