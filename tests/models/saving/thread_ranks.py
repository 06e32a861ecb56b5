"""Ranks as threads of this process: managers in them work as in a job, each with the folder of a node of its own."""

import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import torch

from datasvc.models.saving import manager
from datasvc.models.saving.rank_channel import LostRankError, RankChannel

WAIT_S = 60


class Meeting:
    """Where the ranks of one channel leave their messages."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=WAIT_S)
        self.messages = [None] * size
        self.sent = defaultdict(SimpleQueue)


class ChannelOfThread(RankChannel):
    def __init__(self, meeting, rank):
        self.meeting, self.rank, self.size = meeting, rank, len(meeting.messages)

    def exchange(self, message):
        try:
            self.meeting.messages[self.rank] = message
            self.meeting.barrier.wait()
            messages = list(self.meeting.messages)
            self.meeting.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise LostRankError("a rank is lost") from error
        return messages

    def gather(self, message):
        messages = self.exchange(message)
        return messages if self.rank == 0 else []

    def all_reduce_max(self, numbers):
        return torch.stack(self.exchange(numbers)).max(dim=0).values

    def swap(self, sent, received):
        if sent is not None:
            self.meeting.sent[self.rank, sent[0]].put(sent[1])
        if received is None:
            return b""
        content = self.meeting.sent[received[0], self.rank].get(timeout=WAIT_S)
        assert len(content) == received[1]
        return content


class ThreadRanks:
    """Runs functions on all ranks at once; `monkeypatch` gives their managers channels between the threads."""

    def __init__(self, monkeypatch):
        self._local = threading.local()
        monkeypatch.setattr(manager, "open_channels", self._open)

    def _open(self, _group, _timeout_s, number=2):
        opened = []
        for _ in range(number):
            with self._lock:
                count = self._local.count = getattr(self._local, "count", -1) + 1
                if count == len(self._meetings):
                    self._meetings.append(Meeting(self._size))
            opened.append(ChannelOfThread(self._meetings[count], self._local.rank))
        return opened

    def run(self, size, action):
        """Return the results of `action(rank)`, or the exceptions that it raised, of all ranks."""
        self._size, self._meetings, self._lock = size, [], threading.Lock()

        def one(rank):
            self._local.rank, self._local.count = rank, -1
            try:
                return action(rank)
            except Exception as error:
                return error

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(one, range(size)))
