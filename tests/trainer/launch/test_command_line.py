"""Command lines as people wrote them for horovodrun."""

import json
import os
import runpy
import socket
import sys
from pathlib import Path

import pytest

from datasvc.trainer.env.environment import read_engine_settings
from datasvc.trainer.launch.command_line import main, parse_arguments
from datasvc.trainer.launch.engine_flags import ALREADY_SO, SWITCHES, VALUES, WITHOUT_MEANING
from datasvc.trainer.launch.ranks.job import ElasticOptions, Host, RemoteSettings
from datasvc.trainer.runner.launch import run_commandline


def parse(*arguments, environ=None):
    return parse_arguments([*arguments, "python", "train.py", "--np", "9"], environ or {})


def job_of(*arguments, environ=None):
    job, elastic = parse(*arguments, environ=environ)
    assert elastic is None
    assert job.command == ["python", "train.py", "--np", "9"]
    return job


def refusal(capsys, *arguments, environ=None):
    with pytest.raises(SystemExit) as caught:
        parse(*arguments, environ=environ)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_hosts_come_from_the_command_line_or_a_file(tmp_path):
    assert job_of("-np", "3", "-H", "a:2,b:2").hosts == (Host("a", 2), Host("b", 2))
    file = tmp_path / "hosts"
    file.write_text("a slots=4\n")
    assert job_of("-np", "3", "-hostfile", str(file)).hosts == (Host("a", 4),)
    assert job_of("-np", "3", "--hostfile", str(file)).hosts == (Host("a", 4),)


def test_all_slots_are_taken_if_no_number_is_given():
    assert job_of("-H", "a:2,b:3").num_ranks == 5


def test_the_file_of_hosts_that_is_wrong_is_named(capsys, tmp_path):
    assert "give hosts with -H or with -hostfile" in refusal(capsys, "-H", "a", "-hostfile", "x")
    assert "cannot use the host file" in refusal(capsys, "-np", "2", "-hostfile", str(tmp_path / "none"))


SLURM = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)", "PATH": ""}


def test_inside_an_allocation_its_nodes_are_the_hosts(tmp_path):
    job = job_of(environ=SLURM)
    assert (job.num_ranks, job.hosts, job.remote.shell) == (4, (Host("n1", 2), Host("n2", 2)), "ssh")
    (tmp_path / "srun").write_text("")
    (tmp_path / "srun").chmod(0o755)
    assert job_of(environ={**SLURM, "PATH": str(tmp_path)}).remote.shell == "srun"
    assert job_of("--remote-shell", "ssh", environ={**SLURM, "PATH": str(tmp_path)}).remote.shell == "ssh"
    assert job_of("-H", "elsewhere:2", environ=SLURM).hosts == (Host("elsewhere", 2),)


def test_on_the_only_node_of_an_allocation_the_user_chooses_the_number_of_ranks():
    here = {**SLURM, "SLURM_JOB_NODELIST": socket.gethostname(), "SLURM_TASKS_PER_NODE": "1"}
    assert job_of("-np", "8", environ=here).hosts == ()


def test_ssh_gets_its_port_and_key():
    job = job_of("-np", "1", "-p", "2222", "-i", "key", "--network-interface", "eth0,eth1", "--remote-python", "py")
    assert job.remote == RemoteSettings(
        ssh_port=2222, ssh_identity_file=Path("key"), network_interfaces=("eth0", "eth1"), python="py"
    )


def test_variables_are_set_or_named():
    job = job_of("-np", "1", "-x", "A", "-x", "B=1=2")
    assert (job.passed_names, job.variables) == (("A", "B"), {"B": "1=2"})


def test_flags_of_the_engine_become_what_the_engine_reads():
    flags = ["--fusion-threshold-mb", "32", "--cycle-time-ms", "3.5", "--cache-capacity", "512"]
    flags += ["--stall-check-warning-time-seconds", "7"]
    settings = read_engine_settings(job_of("-np", "2", *flags).variables)
    assert (settings.fusion_bytes, settings.cycle_time_s) == (32 << 20, 0.0035)
    assert (settings.cache_capacity, settings.stall_warning_s) == (512, 7.0)


def test_every_flag_of_the_engine_sets_its_variable_and_none_sets_one_unasked():
    assert job_of("-np", "2").variables == {}
    for flag in VALUES:
        value = flag.choices[0] if flag.choices else "3"
        assert job_of("-np", "2", flag.flag, value).variables == {
            flag.variable: str(int(value) * flag.scale)
            if flag.scale != 1
            else str(float(value))
            if flag.value_type is float
            else value
        }
    for switch in SWITCHES:
        assert job_of("-np", "2", switch.flag).variables == {switch.variable: "1"}
        assert job_of("-np", "2", switch.flag, switch.opposite).variables == {switch.variable: "0"}


def test_flags_that_mean_nothing_here_are_accepted_with_a_note(capsys):
    flags = [word for name, takes in WITHOUT_MEANING.items() for word in ([name, "1"] if takes else [name])]
    job_of("-np", "2", *ALREADY_SO, *flags)
    said = capsys.readouterr().err
    assert "--hierarchical-allgather has no effect on torch.distributed and is ignored" in said
    assert "--mpi-args" in said
    assert not [flag for flag in ALREADY_SO if flag in said]


@pytest.mark.parametrize(
    "flags",
    [
        ["--fusion-threshold-mb", "-1"],
        ["--cycle-time-ms", "fast"],
        ["--cycle-time-ms", "inf"],
        ["--log-level", "LOUD"],
        ["--start-timeout", "0"],
        ["--start-timeout", "nan"],
        ["-np", "0"],
        ["-H", "a:0"],
    ],
)
def test_values_out_of_range_are_usage_errors(capsys, flags):
    assert "error:" in refusal(capsys, "-np", "2", *flags)


def test_a_mistake_is_one_line_with_a_hint(capsys):
    said = refusal(capsys, "-np", "two")
    assert said.count("\n") == 1
    assert said.endswith("--help)\n")


def test_elastic_flags_make_the_job_elastic():
    flags = ["--min-np", "2", "--max-np", "4", "--host-discovery-script", "./find", "--slots-per-host", "2"]
    flags += ["--elastic-timeout", "60", "--reset-limit", "3", "--blacklist-cooldown-range", "10", "100"]
    job, elastic = parse("-np", "3", *flags)
    assert elastic == ElasticOptions(
        min_num_ranks=2,
        max_num_ranks=4,
        discovery_script="./find",
        slots_per_host=2,
        elastic_timeout_s=60.0,
        reset_limit=3,
        cooldown_range_s=(10.0, 100.0),
    )
    assert (job.num_ranks, job.hosts) == (3, ())
    assert parse("--min-num-proc", "2", "-H", "a:4")[0].num_ranks == 2


@pytest.mark.parametrize(
    "flags",
    [["--reset-limit", "3"], ["--elastic-timeout", "60"], ["--blacklist-cooldown-range", "1", "2"]],
)
def test_a_flag_of_elastic_jobs_alone_is_a_usage_error_that_names_it(capsys, flags):
    assert f"{flags[0]} is for elastic jobs: give --min-num-proc" in refusal(capsys, "-np", "2", *flags)


CONFIG = {
    "params": {"fusion_threshold_mb": 32, "cycle_time_ms": 3, "hierarchical_allreduce": False},
    "autotune": {"enabled": True, "log_file": "tune.csv", "warmup_samples": 5},
    "timeline": {"filename": "trace.json", "mark_cycles": True},
    "stall_check": {"enabled": False, "warning_time_seconds": 120},
    "logging": {"level": "INFO", "hide_timestamp": True},
    "library_options": {"gloo_timeout_seconds": 50},
    "verbose": True,
}
IN_YAML = """
params: {fusion_threshold_mb: 32, cycle_time_ms: 3, hierarchical_allreduce: false}
autotune:
  enabled: true
  log_file: tune.csv
  warmup_samples: 5
timeline: {filename: trace.json, mark_cycles: true}
stall_check: {enabled: false, warning_time_seconds: 120}
logging: {level: INFO, hide_timestamp: true}
library_options: {gloo_timeout_seconds: 50}
verbose: true
"""
IN_TOML = """
verbose = true
params = {fusion_threshold_mb = 32, cycle_time_ms = 3, hierarchical_allreduce = false}
autotune = {enabled = true, log_file = "tune.csv", warmup_samples = 5}
timeline = {filename = "trace.json", mark_cycles = true}
stall_check = {enabled = false, warning_time_seconds = 120}
logging = {level = "INFO", hide_timestamp = true}
library_options = {gloo_timeout_seconds = 50}
"""


@pytest.mark.parametrize(("name", "text"), [("c.yaml", IN_YAML), ("c.json", json.dumps(CONFIG)), ("c.toml", IN_TOML)])
def test_a_configuration_file_stands_for_flags_and_the_command_line_wins(tmp_path, name, text):
    if name == "c.yaml":
        pytest.importorskip("yaml")
    (tmp_path / name).write_text(text)
    job = job_of("-np", "2", "--config-file", str(tmp_path / name), "--cycle-time-ms", "9")
    assert job.is_verbose
    assert job.variables == {
        "HOROVOD_FUSION_THRESHOLD": str(32 << 20),
        "HOROVOD_CYCLE_TIME": "9.0",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "0",
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_LOG": "tune.csv",
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "5",
        "HOROVOD_TIMELINE": "trace.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "120",
        "HOROVOD_LOG_LEVEL": "INFO",
        "HOROVOD_LOG_HIDE_TIME": "1",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "50",
    }


def read_config(tmp_path, content):
    (tmp_path / "c.json").write_text(json.dumps(content))
    return parse("-np", "2", "--config-file", str(tmp_path / "c.json"))


@pytest.mark.parametrize(
    ("controller", "note"),
    [("gloo", ""), ("MPI", "--mpi has no effect on torch.distributed and is ignored: the ranks")],
)
def test_another_controller_of_a_configuration_file_than_gloo_gives_a_note(capsys, tmp_path, controller, note):
    job, _ = read_config(tmp_path, {"controller": controller, "verbose": True})
    assert job.is_verbose
    said = capsys.readouterr().err
    assert (note in said) if note else not said


def test_flags_about_time_stamps_have_their_effect_or_none(capsys):
    job = job_of("-np", "2", "-prefix-timestamp", "--no-log-hide-timestamp", "-p", "2222")
    assert job.stamps_lines
    assert job.variables == {"HOROVOD_LOG_HIDE_TIME": "0"}
    assert job_of("-np", "2", "--log-without-timestamp").variables == {"HOROVOD_LOG_HIDE_TIME": "1"}
    assert capsys.readouterr().err == ""


def test_a_list_in_a_configuration_file_is_written_with_commas(tmp_path):
    job, _ = read_config(tmp_path, {"params": {"hosts": ["a:1", "b:1"], "network-interface": ["lo"]}})
    assert job.command == ["python", "train.py", "--np", "9"]
    assert job.hosts == (Host("a", 1), Host("b", 1))
    assert job.remote.network_interfaces == ("lo",)
    elastic = {"elastic": {"min_np": 2, "blacklist_cooldown_range": [10, 100]}}
    assert read_config(tmp_path, elastic)[1].cooldown_range_s == (10.0, 100.0)


def test_switches_in_a_configuration_file_may_be_off_whether_they_have_an_opposite_or_not(capsys, tmp_path):
    off = {"verbose": False, "no_prefix": False, "params": {"disable_cache": False, "no_stall_check": False}}
    off |= {"autotune": {"enabled": False}, "logging": {"hide_timestamp": False}, "timeline": {"mark_cycles": False}}
    job, _ = read_config(tmp_path, off)
    assert (job.is_verbose, job.prefixes_lines) == (False, True)
    assert job.variables == {
        "HOROVOD_STALL_CHECK_DISABLE": "0",
        "HOROVOD_AUTOTUNE": "0",
        "HOROVOD_TIMELINE_MARK_CYCLES": "0",
        "HOROVOD_LOG_HIDE_TIME": "0",
    }
    assert capsys.readouterr().err == ""


def test_names_in_a_configuration_file_may_have_dashes(tmp_path):
    job, _ = read_config(
        tmp_path, {"stall-check": {"enabled": False}, "library-options": {"gloo-timeout-seconds": 5}}
    )
    assert job.variables == {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "5"}
    hidden, _ = read_config(tmp_path, {"logging": {"hide-timestamp": True}, "no-prefix": True})
    assert not hidden.prefixes_lines


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "must contain sections"),
        ('{"parms": {}}', "has an unknown section parms; valid are params"),
        ('{"params": {"cycle_time_ms": {}}}', "the value of cycle-time-ms must be"),
        ("{", "cannot read"),
        ('{"controller": "ring"}', "the controller must be gloo or mpi, not 'ring'"),
        ('{"params": {"speed": 3}}', "unrecognized arguments: --speed=3"),
        ('{"params": {"speed": false}}', "unrecognized arguments: --no-speed"),
        ('{"timeline": {"filename": false}}', "unrecognized arguments: --no-timeline-filename"),
    ],
)
def test_the_error_of_a_wrong_configuration_file_names_the_place(capsys, tmp_path, text, message):
    (tmp_path / "c.json").write_text(text)
    assert message in refusal(capsys, "-np", "2", "--config-file", str(tmp_path / "c.json"))


@pytest.mark.parametrize("prog", ["datasvc-run", "python -m datasvc.trainer.launch", "horovodrun"])
def test_usage_has_the_name_that_the_launcher_was_called_by(prog, capsys, monkeypatch):
    mains = {
        "datasvc-run": main,
        "python -m datasvc.trainer.launch": lambda: runpy.run_module("datasvc.trainer.launch", run_name="__main__"),
        "horovodrun": run_commandline,
    }
    monkeypatch.setattr("sys.argv", ["x", "--no-such-flag"])
    with pytest.raises(SystemExit) as caught:
        mains[prog]()
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{prog}: error: ")
    assert said.endswith(f"(see {prog} --help)\n")


def test_an_interrupt_of_the_launcher_itself_is_one_line(capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("datasvc.trainer.launch.command_line.run_job", interrupted)
    assert main(["-np", "1", "true"]) == 130
    assert capsys.readouterr().err == "datasvc-run: ended by SIGINT\n"


def test_what_is_missing_is_printed_with_how_to_install_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--check-build"])
    assert caught.value.code == 0
    table, _, missing = capsys.readouterr().out.partition("Not available:\n")
    assert "[ ] PyTorch\n" in table
    lines = dict(line.strip().split(": ", maxsplit=1) for line in missing.splitlines())
    assert "pip install torch" in lines["PyTorch"]
    assert "OpenSSH" in lines["ssh"]
    assert lines["Gloo"] == "needs PyTorch"
    assert lines.keys() >= {"torchrun", "NCCL", "CUDA", "MPI", "CCL", "DDL"}


def test_a_job_without_torch_ends_with_the_command_that_installs_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    assert main(["-np", "2", "true"]) == 2
    assert "datasvc-run needs torch, which is not installed: pip install " in capsys.readouterr().err


def test_what_this_installation_can_do_is_printed(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--check-build"])
    assert caught.value.code == 0
    assert "[X] Gloo" in capsys.readouterr().out


def test_the_environment_of_the_tests_is_no_allocation():
    # Otherwise the other tests of the launcher would start their ranks elsewhere.
    assert "SLURM_JOB_NODELIST" not in os.environ
