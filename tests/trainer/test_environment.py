import pytest

from trainer.engine.settings import EngineSettings
from trainer.environment import Place, choose_gloo_interface, place_variables, read_engine_settings, read_place


def launched(rank, size, local_rank, local_size):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return dict(zip(names, map(str, (rank, size, local_rank, local_size)), strict=True))


def test_without_a_launcher_the_process_is_a_world_of_one():
    assert read_place({}) == Place(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)


def test_the_place_among_nodes_follows_from_the_place_in_the_job():
    place = read_place(launched(5, 8, 1, 4))
    assert (place.cross_rank, place.cross_size) == (1, 2)


def test_a_place_is_read_as_it_was_written():
    place = Place(rank=5, size=9, local_rank=1, local_size=4, cross_rank=1, cross_size=3)
    assert read_place(place_variables(place)) == place


def test_horovods_name_for_gloos_interface_is_heeded_unless_gloo_has_one():
    assert choose_gloo_interface({"HOROVOD_GLOO_IFACE": "eth1"}) == {"GLOO_SOCKET_IFNAME": "eth1"}
    assert choose_gloo_interface({"HOROVOD_GLOO_IFACE": "eth1", "GLOO_SOCKET_IFNAME": "eth2"}) == {}
    assert choose_gloo_interface({"HOROVOD_GLOO_IFACE": ""}) == {}


def test_a_half_set_environment_names_what_is_missing():
    with pytest.raises(ValueError, match="lacks LOCAL_RANK, LOCAL_WORLD_SIZE"):
        read_place({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize("place", [(2, 2, 0, 1), (0, 2, 2, 2), (0, 2, 0, 4), (-1, 2, 0, 1)])
def test_an_impossible_place_is_refused(place):
    with pytest.raises(ValueError, match="impossible place"):
        read_place(launched(*place))


def test_settings_have_horovods_names_and_units():
    settings = read_engine_settings({"HOROVOD_FUSION_THRESHOLD": "1024", "HOROVOD_CYCLE_TIME": "2.5"})
    assert settings == EngineSettings(fusion_bytes=1024, cycle_time_s=0.0025)


def test_a_setting_that_is_no_number_is_named():
    with pytest.raises(ValueError, match="HOROVOD_CYCLE_TIME must be a number, not 'fast'"):
        read_engine_settings({"HOROVOD_CYCLE_TIME": "fast"})
