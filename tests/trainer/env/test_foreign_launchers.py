"""Places and addresses of ranks that srun, mpirun or torchrun have started."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.trainer.env.environment import RankPlacement, read_placement
from datasvc.trainer.env.foreign_launchers import translate


def srun(rank, counts, node, local_rank, **more):
    """What srun sets for one task of a job with these numbers of tasks on its nodes."""
    names = ",".join(f"n{index}" for index in range(len(counts)))
    return {
        "SLURM_JOB_ID": "4242",
        "SLURM_STEP_ID": "1",
        "SLURM_STEP_NODELIST": names,
        "SLURM_JOB_NODELIST": f"other,{names}",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(node),
        "SLURM_NTASKS": str(sum(counts)),
        "SLURM_NNODES": str(len(counts)),
        "SLURM_TASKS_PER_NODE": ",".join(map(str, counts)),
        **more,
    }


def mpirun(rank, size, local_rank, local_size, **more):
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    numbers = map(str, (rank, size, local_rank, local_size))
    return {f"OMPI_COMM_WORLD_{name}": number for name, number in zip(names, numbers, strict=True)} | more


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_tasks_of_srun_have_their_places_and_one_address(counts):
    rank, addresses = 0, set()
    for node, count in enumerate(counts):
        for local_rank in range(count):
            environ = srun(rank, counts, node, local_rank)
            assert read_placement(environ) == RankPlacement(rank, sum(counts), local_rank, count, node, len(counts))
            variables = translate(environ)
            addresses.add((variables.get("MASTER_ADDR"), variables.get("MASTER_PORT")))
            rank += 1
    assert len(addresses) == 1


def test_the_store_of_srun_is_on_the_first_node_of_the_step_and_its_port_follows_from_the_job():
    variables = translate(srun(3, [2, 2], 1, 1))
    assert variables["MASTER_ADDR"] == "n0"
    assert 20_000 <= int(variables["MASTER_PORT"]) < 32_000
    assert translate(srun(3, [2, 2], 1, 1, SLURM_STEP_ID="2"))["MASTER_PORT"] != variables["MASTER_PORT"]


def test_an_address_that_the_user_set_is_kept():
    variables = translate(srun(3, [2, 2], 1, 1, MASTER_ADDR="chosen", MASTER_PORT="1234"))
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("chosen", "1234")


def test_a_step_of_fewer_tasks_than_the_job_counts_its_own():
    environ = srun(1, [4], 0, 1, SLURM_STEP_NUM_TASKS="2", SLURM_STEP_TASKS_PER_NODE="2", SLURM_STEP_NUM_NODES="1")
    assert read_placement(environ) == RankPlacement(1, 2, 1, 2, 0, 1)


def test_a_batch_script_without_srun_is_a_world_of_one():
    environ = srun(0, [4, 4], 0, 0, ENVIRONMENT="BATCH")
    del environ["SLURM_STEP_ID"]
    assert read_placement(environ) == RankPlacement()


def test_the_variables_of_torchrun_and_of_our_launcher_go_before_those_of_srun():
    ours = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    cross = {"HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2"}
    assert read_placement({**srun(0, [1], 0, 0), **ours, **cross}) == RankPlacement(1, 3, 0, 1, 1, 2)
    assert translate({**srun(0, [1], 0, 0), **ours}) == {}


def test_ranks_of_mpirun_on_one_machine_meet_there():
    environ = mpirun(1, 2, 1, 2, PMIX_NAMESPACE="123")
    assert read_placement(environ) == RankPlacement(1, 2, 1, 2, 0, 1)
    assert translate(environ)["MASTER_ADDR"] == "127.0.0.1"


def test_a_variable_that_mpirun_does_not_set_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="set MASTER_ADDR"):
        read_placement(mpirun(1, 4, 1, 2, PMIX_NAMESPACE="123"))
    with pytest.raises(ValueError, match="set MASTER_PORT"):
        read_placement(mpirun(1, 4, 1, 2, MASTER_ADDR="n0"))
    environ = mpirun(3, 4, 1, 2, MASTER_ADDR="n0", MASTER_PORT="1")
    assert read_placement(environ) == RankPlacement(3, 4, 1, 2, 1, 2)
    del environ["OMPI_COMM_WORLD_LOCAL_SIZE"]
    with pytest.raises(ValueError, match="lacks OMPI_COMM_WORLD_LOCAL_SIZE"):
        read_placement(environ)


@pytest.mark.parametrize(
    "change", [{"SLURM_NODEID": "7"}, {"SLURM_NODEID": "x"}, {"SLURM_PROCID": "x"}, {"SLURM_LOCALID": "9"}]
)
def test_impossible_places_are_errors(change):
    with pytest.raises(ValueError, match=r"SLURM_NODEID|whole number|invalid placement"):
        read_placement({**srun(1, [2], 0, 1), **change})
