"""A device of the host's memory, whose copies are done when a test says so."""

import contextlib
import itertools

import numpy as np
import torch


class Moment:
    """Is past when a test, or who waits for it, says so."""

    def __init__(self, number, log):
        self.number, self.log, self.is_past = number, log, False

    def query(self):
        return self.is_past

    def synchronize(self):
        self.log.append(("host waits", self.number))
        self.is_past = True


class RecordedStream:
    """A `CudaStream` in the host's memory that writes down what is asked of it, in order.

    Attributes:
        log: of (what, which), moments and slots counted from 0.
        moments: as they were recorded.
        slots: as they were allocated.
        handed: tensors, as they were handed over.
    """

    def __init__(self):
        self.log, self.moments, self.slots, self.handed = [], [], [], []
        self.is_active = False
        self._numbers = itertools.count()

    def allocate(self, shape):
        self.slots.append(np.zeros(shape, np.uint8))
        return self.slots[-1]

    @contextlib.contextmanager
    def active(self):
        self.is_active = True
        yield
        self.is_active = False

    def copy(self, array):
        assert self.is_active, "a copy on the caller's stream waits for its kernels"
        slot = [np.shares_memory(array, slot) for slot in self.slots].index(True) if len(array) else None
        self.log.append(("copy", slot))
        return torch.from_numpy(array.copy())

    def record(self):
        assert not self.is_active
        self.moments.append(Moment(next(self._numbers), self.log))
        return self.moments[-1]

    def hand_over(self, tensor, done):
        self.log.append(("hand over", done.number))
        self.handed.append(tensor)
