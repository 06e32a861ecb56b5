import pytest
import torch
from torch import nn

from datasvc.errors import ConfigError
from datasvc.models import save
from datasvc.models.interop.onnx_file import export_onnx, make_input, make_model


def small_net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))


@pytest.mark.slow
def test_the_program_computes_what_the_model_does_at_any_batch_size(repository, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    net = small_net()
    save(repository, "m", {"model": net.state_dict()}, step=0)
    done = export_onnx(repository, "m", tmp_path / "out", small_net(), [torch.zeros(2, 3, 8, 8)])
    assert done.loaded.is_exact
    program = onnx.load(str(tmp_path / "out" / "model.onnx"))
    x = torch.randn(7, 3, 8, 8)
    (y,) = ReferenceEvaluator(program).run(None, {program.graph.input[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), net.eval()(x).detach())


def test_without_onnx_it_says_what_to_install(repository, tmp_path, monkeypatch):
    monkeypatch.setattr("datasvc.models.interop.onnx_file.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"needs onnx and onnxscript: pip install 'onnx>=1.18' 'onnxscript>="):
        export_onnx(repository, "m", tmp_path / "out", small_net(), [torch.zeros(1)])


def test_models_and_inputs_are_named_as_text():
    assert isinstance(make_model("tests.models.interop.test_onnx_file:small_net"), nn.Sequential)
    assert make_input("2x3:int64").dtype == torch.int64
    assert make_input("5").shape == (5,)
    for text in ("torch.nn", "no.such:thing", "torch.nn:no_such", "torch.nn:Linear", "os:getcwd"):
        with pytest.raises(ConfigError):
            make_model(text)
    for text in ("2,3", "2x3:float3", "x", ""):
        with pytest.raises(ConfigError):
            make_input(text)
