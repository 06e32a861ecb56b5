import logging
import re

import pytest

from datasvc.trainer.env.environment import (
    EngineSettings,
    RankPlacement,
    choose_gloo_interface,
    configure_logging,
    placement_variables,
    read_engine_settings,
    read_placement,
)


def launched(rank, size, local_rank, local_size):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return dict(zip(names, map(str, (rank, size, local_rank, local_size)), strict=True))


def test_without_a_launcher_the_process_is_a_world_of_one():
    assert read_placement({}) == RankPlacement(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)


def test_the_place_among_nodes_follows_from_the_place_in_the_job():
    place = read_placement(launched(5, 8, 1, 4))
    assert (place.cross_rank, place.cross_size) == (1, 2)


def test_a_place_is_read_as_it_was_written():
    place = RankPlacement(rank=5, size=9, local_rank=1, local_size=4, cross_rank=1, cross_size=3)
    assert read_placement(placement_variables(place)) == place


def test_horovods_variable_for_the_interface_is_used_unless_gloos_is_set():
    assert choose_gloo_interface({"HOROVOD_GLOO_IFACE": "eth1"}) == {"GLOO_SOCKET_IFNAME": "eth1"}
    assert choose_gloo_interface({"HOROVOD_GLOO_IFACE": "eth1", "GLOO_SOCKET_IFNAME": "eth2"}) == {}
    assert choose_gloo_interface({"HOROVOD_GLOO_IFACE": ""}) == {}


def test_a_half_set_environment_names_what_is_missing():
    with pytest.raises(ValueError, match="lacks LOCAL_RANK, LOCAL_WORLD_SIZE"):
        read_placement({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize("place", [(2, 2, 0, 1), (0, 2, 2, 2), (0, 2, 0, 4), (-1, 2, 0, 1)])
def test_an_impossible_place_is_refused(place):
    with pytest.raises(ValueError, match="invalid placement"):
        read_placement(launched(*place))


def test_settings_have_horovods_names_and_units():
    settings = read_engine_settings({"HOROVOD_FUSION_THRESHOLD": "1024", "HOROVOD_CYCLE_TIME": "2.5"})
    assert settings == EngineSettings(fusion_bytes=1024, cycle_time_s=0.0025)


def test_a_setting_that_is_no_number_is_named():
    with pytest.raises(ValueError, match="HOROVOD_CYCLE_TIME must be a number, not 'fast'"):
        read_engine_settings({"HOROVOD_CYCLE_TIME": "fast"})


@pytest.fixture
def trainer_logger(monkeypatch):
    """The trainer's logger in a program without handlers, which pytest has."""
    logger = logging.getLogger("datasvc.trainer")
    level = logger.level
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", False)
    yield logger
    logger.setLevel(level)


@pytest.mark.parametrize(
    ("variables", "pattern"),
    [
        ({"HOROVOD_LOG_LEVEL": "info"}, r"\d{4}-\d\d-\d\d .* INFO datasvc.trainer.engine: ready\n"),
        ({"HOROVOD_LOG_LEVEL": "INFO", "HOROVOD_LOG_HIDE_TIME": "1"}, r"INFO datasvc.trainer.engine: ready\n"),
        ({"HOROVOD_LOG_LEVEL": "INFO", "HOROVOD_LOG_TIMESTAMP": "0"}, r"INFO datasvc.trainer.engine: ready\n"),
        ({"HOROVOD_LOG_HIDE_TIME": "0"}, ""),
    ],
)
def test_the_log_has_the_level_and_the_time_that_horovod_s_variables_ask_for(
    variables, pattern, trainer_logger, capsys
):
    # Where nothing propagates, pytest adds handlers of its own.
    trainer_logger.handlers.clear()
    for _ in range(2):
        configure_logging(variables)
    assert len(trainer_logger.handlers) == 1
    logging.getLogger("datasvc.trainer.engine").info("ready")
    assert re.fullmatch(pattern, capsys.readouterr().err)


def test_the_log_is_left_alone_unless_a_variable_is_set_and_handlers_of_the_program_stay(trainer_logger):
    trainer_logger.handlers.clear()
    configure_logging({})
    assert trainer_logger.handlers == []
    own = logging.NullHandler()
    trainer_logger.addHandler(own)
    configure_logging({"HOROVOD_LOG_LEVEL": "DEBUG"})
    assert (trainer_logger.handlers, trainer_logger.level) == ([own], logging.DEBUG)
    with pytest.raises(ValueError, match=r"HOROVOD_LOG_LEVEL must be one of TRACE, .*, not 'loud'"):
        configure_logging({"HOROVOD_LOG_LEVEL": "loud"})
