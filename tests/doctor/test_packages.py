"""What the doctor says of packages, decoders and GPUs."""

import importlib.metadata
import sys

import pytest

from datasvc.doctor.packages import examine_decoder, examine_decoding, examine_packages
from datasvc.extras import CORE, EXTRAS, PURPOSES
from tests.doctor.findings import by_check


@pytest.fixture
def versions(monkeypatch):
    """Versions of packages as if they were installed; None: not installed."""
    changed = {}
    actual = importlib.metadata.version

    def version(name):
        found = changed[name] if name in changed else actual(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    return changed


def test_all_that_datasvc_needs_is_installed_here():
    found = by_check(examine_packages())
    assert found["packages"].level == "ok"
    assert f"numpy {importlib.metadata.version('numpy')}" in found["packages"].text


def test_a_missing_package_and_an_old_one_are_a_problem_with_the_command_that_installs_them(versions):
    versions |= {"lmdb": None, "numpy": "1.26.4"}
    finding = by_check(examine_packages())["packages"]
    assert (finding.level, finding.text) == ("problem", "lmdb is not installed; numpy is 1.26.4, older than 2.0")
    assert finding.advice.startswith("pip install ")
    assert all(f"'{requirement}'" in finding.advice for requirement in CORE)


def test_a_missing_extra_says_what_it_adds_and_is_no_problem(versions):
    versions |= {"jinja2": None}
    finding = by_check(examine_packages(extras=["ui"]))["extra ui"]
    assert finding.level == "ok"
    assert finding.text == "not installed (jinja2); it adds `datasvc ui`, the pages in the browser"
    assert "pip install 'duckdb>=2.0' 'jinja2>=3.1'" in finding.advice


def test_an_extra_that_is_too_old_is_a_warning(versions):
    versions |= {"cryptography": "41.0.7"}
    assert by_check(examine_packages(extras=["sign"]))["extra sign"].level == "warning"


def test_packages_for_another_cuda_are_not_offered_beside_those_that_are_installed(versions):
    names = ["images", "gpu", "gpu-cu12"]
    cuda12 = dict.fromkeys(("nvidia-dali-cuda120", "nvidia-nvimgcodec-cu12"))
    versions |= {"torch": "2.13.0", "nvidia-dali-cuda130": "2.4", "nvidia-nvimgcodec-cu13": "0.9", **cuda12}
    assert [*by_check(examine_packages(extras=names))][2:] == ["extra images", "extra gpu"]
    versions |= {"nvidia-dali-cuda130": None, "nvidia-nvimgcodec-cu13": None, **dict.fromkeys(cuda12, "2.4")}
    assert [*by_check(examine_packages(extras=names))][2:] == ["extra gpu-cu12"]


def test_every_extra_says_what_it_adds():
    assert PURPOSES.keys() == EXTRAS.keys()


def test_without_a_gpu_the_decoder_is_the_fast_one_of_the_cpu():
    found = by_check(examine_decoding({}))
    assert [(check, finding.level) for check, finding in found.items()] == [("gpu", "ok"), ("decoder", "ok")]
    assert found["decoder"].text.startswith("'cpu'")


def test_without_nvimgcodec_the_decoder_is_the_slow_one_with_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia", None)
    finding = examine_decoder(has_gpu=False)
    assert (finding.level, finding.text.partition(",")[0]) == ("warning", "'pillow'")
    assert "nvImageCodec" in finding.text
    assert "pip install '.[images]'" in finding.advice


def test_a_gpu_without_dali_is_a_warning(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia", None)
    finding = examine_decoder(has_gpu=True)
    assert (finding.level, "DALI" in finding.text) == ("warning", True)


def test_a_gpu_with_dali_has_a_choice_of_decoders():
    assert "gpu-window" in examine_decoder(has_gpu=True).text


@pytest.mark.parametrize(("driver", "level"), [("580.65.06", "ok"), ("550.54.14", "problem")])
def test_a_driver_that_is_too_old_for_the_cuda_of_dali_is_a_problem(driver, level, versions):
    versions |= {"nvidia-dali-cuda130": "2.4.0", "nvidia-dali-cuda120": None}
    found = by_check(examine_decoding({"gpus": {"NVIDIA H100": 8}, "driver": driver}))
    assert found["gpu"].text == f"8 x NVIDIA H100, driver {driver}"
    assert found["dali"].level == level
    assert ("gpu-cu12" in found["dali"].advice) == (level == "problem")


def test_a_driver_without_gpus_is_a_warning(versions):
    versions |= {"nvidia-dali-cuda130": None, "nvidia-dali-cuda120": None}
    assert by_check(examine_decoding({"driver": "580.65.06"}))["gpu"].level == "warning"
