"""Waiting for others: as long as something moves, and not for ever."""

import asyncio

import pytest

from datasvc.errors import UnavailableError
from datasvc.node.transfers.sending import wait_for_progress


def test_a_result_is_returned_and_an_error_raised():
    async def run():
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_result, 7)
        assert await wait_for_progress(future, idle_s=lambda: 0) == 7
        failed = asyncio.get_running_loop().create_future()
        failed.set_exception(UnavailableError("gone"))
        with pytest.raises(UnavailableError, match="gone"):
            await wait_for_progress(failed, idle_s=lambda: 0)

    asyncio.run(run())


def test_a_wait_without_progress_ends_and_its_work_continues():
    async def run():
        future = asyncio.get_running_loop().create_future()
        with pytest.raises(UnavailableError, match="try another node"):
            await wait_for_progress(future, idle_s=lambda: 1, stall_timeout_s=0.01)
        assert not future.cancelled()

    asyncio.run(run())


def test_what_moves_is_waited_for_beyond_the_timeout():
    async def run():
        future = asyncio.get_running_loop().create_future()
        looks = []

        def idle():
            looks.append(0)
            if len(looks) == 20:
                future.set_result("arrived")
            return 0

        assert await wait_for_progress(future, idle_s=idle, stall_timeout_s=0.001) == "arrived"

    asyncio.run(run())
