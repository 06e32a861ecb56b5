"""Values in a state that are neither tensors nor JSON come back as what they were, or are refused at the save."""

import argparse
import dataclasses
import datetime as dt
import enum
import functools
import pathlib
import types
import uuid
import zoneinfo
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

import datasvc
from datasvc.errors import ConfigError
from datasvc.models.tensors.state_tree import decode_state, encode_state, flatten, unflatten


class Phase(enum.Enum):
    WARM = "warm"
    LONG = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


class Bits(enum.Flag):
    A = 1
    B = 2


@dataclasses.dataclass(frozen=True)
class Plan:
    steps: int
    phase: Phase
    inner: tuple = ()


@dataclasses.dataclass(slots=True)
class Slotted:
    rate: float


VALUES = [
    Counter(cat=2, dog=-1),
    Counter({3: 1, 7: 2}),
    defaultdict(list, a=[1]),
    defaultdict(None, {"$a": 1}),
    OrderedDict(b=1, a=OrderedDict()),
    deque([1, (2, 3)], maxlen=4),
    deque(),
    {1, "a", (2, 3)},
    frozenset([1.5]),
    range(3, 9, 2),
    slice(None, 5, 2),
    Phase.WARM,
    Phase.LONG,
    Level.LOW,
    Bits.B,
    complex(float("inf"), -0.0),
    bytearray(b"\0a"),
    np.float64(0.1),
    np.float32(0.1),
    np.int64(-(2**63)),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.str_("é"),
    np.str_(""),
    np.datetime64("2026-01-02T03:04:05.678901234"),
    np.complex64(1 + 2j),
    dt.date(1, 1, 1),
    dt.time(1, 2, 3, 4, tzinfo=dt.UTC),
    dt.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    dt.datetime(2026, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=5, minutes=30))),
    dt.timedelta(days=-1, microseconds=5),
    Decimal("1.10"),
    Fraction(1, 3),
    uuid.UUID(int=5),
    pathlib.Path("/data/x"),
    pathlib.PureWindowsPath("c:\\x"),
    argparse.Namespace(lr=0.1, phases=[Phase.WARM]),
    types.SimpleNamespace(a=1),
    Plan(5, Phase.LONG, (np.float32(1), {1})),
    Slotted(0.5),
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.float8_e8m0fnu,
    torch.channels_last,
    torch.sparse_coo,
    torch.device("cuda:1"),
]


def there_and_back(state):
    skeleton, tensors = flatten(state)
    return unflatten(decode_state(encode_state(skeleton), "v"), tensors)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_with_its_type(value):
    """pytorch/pytorch#98921: what was a Counter, a dtype or a deque is one after a restore."""
    back = there_and_back({"a": [value], "b": {"c": (value,)}})["b"]["c"][0]
    assert (type(back), back) == (type(value), value)
    if not isinstance(value, set):  # equal sets may have another order
        assert repr(back) == repr(value)  # so that 0.0 is not -0.0
    if isinstance(value, defaultdict | deque):
        assert getattr(back, "default_factory", None) is getattr(value, "default_factory", None)
        assert getattr(back, "maxlen", None) == getattr(value, "maxlen", None)
    if isinstance(value, dt.datetime):
        assert (back.tzinfo, back.fold, back.utcoffset()) == (value.tzinfo, value.fold, value.utcoffset())


def test_a_schedule_with_milestones_goes_on_after_a_restore(tmp_path):
    """pytorch/pytorch#33229: `MultiStepLR` looks its milestones up in a Counter, which has 0 for any other step."""
    repository = datasvc.open(str(tmp_path), create=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 7])
    moments = defaultdict(dict, {0: {"m": torch.ones(2)}})
    with repository.models.manager("m") as model:
        state = {"schedule": schedule.state_dict(), "state": moments}
        model.save(state, step=1).result()
        into = {"schedule": None, "state": defaultdict(dict, {0: {"m": torch.zeros(2)}})}
        for restored in (model.restore().state, model.restore(into=into).state):
            schedule.load_state_dict(restored["schedule"])
            schedule.step(5)
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
            assert restored["state"][0]["m"].tolist() == [1, 1]
            assert restored["state"][5] == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (defaultdict(lambda: 0), "a defaultdict with <function"),
        (Bits.A | Bits.B, "a combination of flags"),
        (functools.partial(print), "is a partial"),
        (UserDict(a=1), r"is a UserDict.*dict\(\) of a mapping"),
        (type("Items", (list,), {})(), "is a Items"),
        (torch.max(torch.ones(1, 1), 0), r"is a max.*convert it with tuple\(\)"),
        (torch.Generator(), r"store its get_state\(\)"),
        (dt.datetime(2026, 1, 1, tzinfo=type("Odd", (dt.tzinfo,), {})()), "convert it to UTC"),
        (np.array([1, "a"], object), "array of object"),
        (np.zeros(1, [("a", "f4")])[0], "is a void"),
        (1 << 10_000, "integer of over"),
    ],
)
def test_a_value_that_would_come_back_as_something_else_is_refused_at_the_save(value, message):
    """Lightning-AI/pytorch-lightning#19573: the place in the state says what to change."""
    with pytest.raises(ConfigError, match=f"(?s)callbacks.0.*{message}"):
        flatten({"callbacks": [value]})


def test_classes_of_a_program_that_is_gone_keep_their_values(monkeypatch):
    raw = encode_state(flatten({"plan": Plan(5, Phase.WARM), "level": Level.LOW})[0])
    for name in ("Plan", "Phase", "Level"):
        monkeypatch.delattr(f"{__name__}.{name}")
    back = unflatten(decode_state(raw, "v"), {})
    assert (back["plan"].steps, back["plan"].phase.value, back["level"].name) == (5, "warm", "LOW")
    assert back["level"] == 1  # as the member of an IntEnum was
    assert repr(back["plan"]).startswith("Plan(steps=5")


def test_a_torch_file_of_a_version_opens_with_the_defaults_of_torch(tmp_path):
    """jtabox/safetensors-converter#2: an export has only types that `torch.load` accepts without trust."""
    repository = datasvc.open(str(tmp_path / "repo"), create=True)
    state = {"seen": Counter(a=1), "values": VALUES, "w": torch.ones(2), "size": torch.Size([1])}
    repository.models.save("m", state, step=1)
    repository.models.export("m", tmp_path / "m.pt", format="torch")
    loaded = torch.load(tmp_path / "m.pt" / "checkpoint.pt")
    loaded = loaded.get("state", loaded)
    assert type(loaded["seen"]) is Counter
    assert loaded["seen"]["b"] == 0
    assert len(loaded["values"]) == len(VALUES)
    assert loaded["values"][-1] == torch.device("cuda:1")
    assert not repository.models.verify("m", deep=True).problems
