"""`python -m datasvc.trainer`: how it ends."""

import pytest

from datasvc.errors import ConfigError
from datasvc.trainer.__main__ import main
from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.recipes.profiling import command


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (HorovodInternalError("rank 1 is gone"), 1, "error: HorovodInternalError: rank 1 is gone\n"),
        (ConfigError("steps is 0"), 2, "error: steps is 0\n"),
        (KeyboardInterrupt(), 130, "error: interrupted by Ctrl-C; steps since the last checkpoint are lost\n"),
    ],
)
def test_what_ends_a_profile_is_said_in_a_line(monkeypatch, capsys, error, status, says):
    def fail(_words, prog):
        raise error

    monkeypatch.setattr(command, "main", fail)
    monkeypatch.setattr("sys.argv", ["trainer", "profile"])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == status
    assert capsys.readouterr().err == says
