"""States whose tensors lie on a device: saved as they are when asked, restored bit for bit, trained on from there."""

import pytest
import torch
from torch import nn

import datasvc
from datasvc.models.saving.staging_buffer import HostBuffer
from datasvc.trainer.recipes import random_state
from tests.support.devices import CUDA, DEVICES, on_gpu

each_device = pytest.mark.parametrize("device", DEVICES)

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def busy(device):
    """Keep the current stream of a device at work for some tenths of a second."""
    if device == "cuda":
        torch.cuda._sleep(300_000_000)


def layouts(dtype, device):
    """Return tensors of a type by the way they lie in memory."""
    whole = torch.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3).remainder(7).to(dtype).to(device)
    return {
        "contiguous": whole,
        "transposed": whole.transpose(0, 2),
        "every second": whole[:, ::2],
        "channels last": whole.to(memory_format=torch.channels_last),
        "expanded": whole[:1].expand(3, 4, 6, 3),
        "slice behind an offset": whole[1, 1:],
        "without dimensions": whole[0, 0, 0, 1],
        "empty": whole[:0],
        "no columns": whole[..., :0],
        "parameter": nn.Parameter(whole.clone(), requires_grad=dtype.is_floating_point),
    }


def bits(tensor):
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat


def check_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(found[name]), bits(tensor)), name


@each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_of_every_type_and_layout_are_the_same_bits(device, dtype):
    tensors = layouts(dtype, device)
    copies = HostBuffer().copy(tensors)
    copies.wait()
    check_same(copies.tensors, tensors)
    assert {each.device.type for each in copies.tensors.values()} == {"cpu"}


@each_device
@pytest.mark.parametrize("codec", ["none", "planes", "delta"])
def test_every_type_and_layout_comes_back_from_a_repository(repository, device, codec):
    state = {str(dtype): layouts(dtype, device) for dtype in DTYPES}
    repo = datasvc.open(repository.url)
    with repo.models.manager("odd", codec=codec) as model:
        for step in range(2):
            model.save(state, step=step).result()
        restored = model.restore().state
    for name, tensors in state.items():
        check_same(restored[name], tensors)


@each_device
def test_a_save_holds_what_was_there_when_it_was_asked_for_though_the_device_is_behind(repository, device):
    weights = torch.zeros(1 << 20, device=device)
    with datasvc.open(repository.url).models.manager("busy", codec="none") as model:
        handles = []
        for step in range(4):
            busy(device)
            weights += 1  # queued, not done
            handles.append(model.save({"w": weights, "step": step}, step=step))
            weights += 1
            busy(device)
            weights *= 1
        for step, handle in enumerate(handles):
            state = model.restore(str(handle.result())).state
            assert state["step"] == step
            assert state["w"].unique().tolist() == [2 * step + 1]


@on_gpu
def test_a_save_on_another_stream_than_that_of_the_update_waits_for_it_where_the_program_does(repository):
    own = torch.cuda.Stream()
    weights = torch.zeros(1 << 20, device="cuda")
    with datasvc.open(repository.url).models.manager("streams", codec="none") as model:
        busy("cuda")
        weights += 1
        own.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(own):
            handle = model.save({"w": weights}, step=1)
        torch.cuda.current_stream().wait_stream(own)
        weights += 1
        state = model.restore(str(handle.result())).state
    assert state["w"].unique().tolist() == [1]


class Training:
    """A small model, its optimizer and its loss scale on a device."""

    def __init__(self, device):
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scale = torch.amp.GradScaler(device, init_scale=2.0**20, growth_interval=3)

    def step(self, number):
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(16, 8, generator=generator).to(self.device)
        targets = torch.randint(4, (16,), generator=generator).to(self.device)
        self.optimizer.zero_grad()
        with torch.autocast(self.device, dtype=torch.float16 if self.device == "cuda" else torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(inputs).float(), targets)
        if number == 2:
            loss = loss * float("inf")  # the scale falls, and the step is left out
        self.scale.scale(loss).backward()
        self.scale.step(self.optimizer)
        self.scale.update()

    def state(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scale": self.scale.state_dict(),
        }

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scale.load_state_dict(state["scale"])


@each_device
def test_a_training_with_a_loss_scale_goes_on_from_a_restore_bit_for_bit(repository, device):
    through = Training(device)
    with datasvc.open(repository.url).models.manager("scaled") as model:
        for number in range(4):
            through.step(number)
        handle = model.save(through.state(), step=4)
        scale_then = through.scale.get_scale()
        for number in range(4, 10):
            through.step(number)
        restored = Training(device)
        restored.load(model.restore(str(handle.result())).state)
    assert restored.scale.get_scale() == scale_then < 2.0**20
    for number in range(4, 10):
        restored.step(number)
    assert restored.scale.get_scale() == through.scale.get_scale()
    check_same(restored.model.state_dict(), through.model.state_dict())
    assert all(parameter.device.type == device for parameter in restored.model.parameters())
    moments = [
        value for state in restored.optimizer.state.values() for name, value in state.items() if name != "step"
    ]
    assert {moment.device.type for moment in moments} == {device}


@each_device
def test_random_draws_on_a_device_go_on_where_they_were(repository, device):
    def draw():
        return torch.rand(5, device=device).tolist(), torch.nn.functional.dropout(
            torch.ones(64, device=device)
        ).tolist()

    random_state.seed_all(3)
    draw()
    state = random_state.capture()
    with datasvc.open(repository.url).models.manager("draws") as model:
        handle = model.save({"random": state}, step=1)
        first = draw()
        assert draw() != first
        random_state.reinstate(model.restore(str(handle.result())).state["random"])
    assert draw() == first


@pytest.mark.parametrize(
    ("saver", "reader"),
    [("cpu", "cpu"), pytest.param("cpu", "cuda", marks=CUDA.marks), pytest.param("cuda", "cpu", marks=CUDA.marks)],
)
def test_a_training_moves_between_devices_with_its_optimizer(repository, saver, reader):
    first = Training(saver)
    first.step(0)
    with datasvc.open(repository.url).models.manager("moved") as model:
        handle = model.save(first.state(), step=1)
        second = Training(reader)
        second.load(model.restore(str(handle.result())).state)
    check_same(second.model.state_dict(), first.model.state_dict())
    second.step(1)
    assert all(parameter.isfinite().all() for parameter in second.model.parameters())
