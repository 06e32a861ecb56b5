"""One answer for all ranks, through a store."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch import distributed
from torch.distributed import HashStore, TCPStore

from datasvc.errors import ConfigError, UnavailableError
from datasvc.loaders.ranks.data_ranks import agree, default_store
from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.rendezvous.rendezvous import RoundStore

SHORT = timedelta(milliseconds=50)


def never():
    raise AssertionError("only the first rank chooses")


def test_every_rank_gets_what_the_first_chose_whoever_asks_first():
    store = HashStore()
    with ThreadPoolExecutor(2) as ranks:
        others = [ranks.submit(agree, "q", never, is_first=False, store=store) for _ in range(2)]
        assert agree("q", lambda: "gpu-whole", is_first=True, store=store) == "gpu-whole"
        assert [other.result() for other in others] == ["gpu-whole"] * 2


def test_peers_of_the_first_rank_choose_once_between_them_and_a_question_keeps_its_answer():
    store = HashStore()
    assert agree("q", lambda: "cpu", is_first=True, store=store) == "cpu"
    assert agree("q", never, is_first=True, store=store) == "cpu"
    assert agree("another", lambda: "gpu-window", is_first=True, store=store) == "gpu-window"


def test_an_error_of_the_first_rank_is_raised_on_all():
    store = HashStore()

    def fail():
        raise ConfigError("decode='gpu' decodes nothing on this machine")

    with pytest.raises(ConfigError, match="decodes nothing"):
        agree("q", fail, is_first=True, store=store)
    with pytest.raises(ConfigError, match=r"data rank 0 could not choose: .*decodes nothing"):
        agree("q", never, is_first=False, store=store)


def test_where_the_first_rank_never_asks_the_others_say_so():
    said = r"data rank 0 did not report .* create and iterate the same loaders on every rank of a job"
    with pytest.raises(UnavailableError, match=said):
        agree("q", never, is_first=False, store=HashStore(), timeout=SHORT)


def test_where_a_rank_of_an_elastic_job_is_lost_the_error_is_that_of_the_round():
    store = HashStore()
    store.set("broken", "rank 0, worker a:0:0 has exited")
    lost = RoundStore(store, prefix="round", broken_key="broken", timeout_s=10)
    with pytest.raises(HorovodInternalError, match="rank 0, worker a:0:0 has exited"):
        agree("q", never, is_first=False, store=lost)
    waiting = RoundStore(HashStore(), prefix="round", broken_key="broken", timeout_s=10)
    with pytest.raises(UnavailableError, match=r"data rank 0 did not report within 0:00:00\.05"):
        agree("q", never, is_first=False, store=waiting, timeout=SHORT)


def test_where_the_process_of_the_store_has_exited_the_error_says_so():
    server = TCPStore("127.0.0.1", 0, is_master=True)
    store = TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    with pytest.raises(UnavailableError, match="the store of the process group cannot be reached"):
        agree("q", never, is_first=False, store=store)


def elastic_store():
    return RoundStore(HashStore(), prefix="round", broken_key="broken", timeout_s=10)


@pytest.mark.parametrize("make_store", [HashStore, elastic_store])
def test_the_store_is_that_of_the_process_group_where_there_is_one(make_store):
    assert default_store() is None
    store = make_store()  # whoever makes one in Python keeps it
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert agree("q", lambda: "cpu", is_first=True, store=default_store()) == "cpu"
        assert agree("q", never, is_first=False, store=default_store()) == "cpu"
    finally:
        distributed.destroy_process_group()
    assert default_store() is None
