"""Whatever is done to a run between two batches: an epoch is served exactly, with the images it would have."""

import json
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from datasvc.loaders import DataRanks, DecodeConfig, ImageLoader
from tests.examples import examples

ROOT = Path(__file__).parents[3]
EPOCH = 360
ACTIONS = st.one_of(
    st.tuples(st.just("read"), st.integers(1, 4)),
    st.tuples(st.just("save"), st.none()),
    st.tuples(st.just("kill"), st.none()),
    st.tuples(st.just("resize"), st.tuples(st.integers(1, 4), st.integers(1, 40))),
    st.tuples(st.just("threads"), st.tuples(st.integers(1, 3), st.integers(1, 4))),
)


class Run:
    """All ranks of a run, and the positions that its steps since the last save served."""

    def __init__(self, split):
        self.split = split
        self.world_size, self.batch_size, self.num_threads, self.prefetch = 1, 32, 1, 2
        self.saved, self.loaders = None, []
        self.served, self.unsaved = {}, {}

    def start(self):
        self.stop()
        for rank in range(self.world_size):
            # fmt: off
            loader = ImageLoader(
                self.split, batch_size=self.batch_size, training=True, size=8, tail="pad",
                ranks=DataRanks(rank, self.world_size),
                decode=DecodeConfig(num_threads=self.num_threads, prefetch=self.prefetch),
            )
            # fmt: on
            if self.saved is not None:
                loader.load_state_dict(json.loads(self.saved))
            self.loaders.append(loader)

    def stop(self):
        for loader in self.loaders:
            loader.close()
        self.loaders, self.unsaved = [], {}

    def read(self, steps):
        """Serve some steps; returns whether the epoch has more."""
        if not self.loaders:
            self.start()
        for _ in range(steps):
            if not self.loaders[0].steps_left or self.loaders[0].epoch:
                return False
            for loader in self.loaders:
                batch = next(iter(loader))
                for position, image, kept in zip(batch.positions.tolist(), batch.images, batch.mask, strict=True):
                    if kept:
                        assert position not in self.served
                        assert position not in self.unsaved
                        self.unsaved[position] = image
        return True

    def save(self):
        states = [json.dumps(loader.state_dict()) for loader in self.loaders]
        assert len(set(states)) <= 1
        if states:
            self.saved = states[0]
            self.served |= self.unsaved
            self.unsaved = {}


@examples(12)
@given(st.lists(ACTIONS, max_size=14))
def test_reads_saves_kills_and_resizes_in_any_order_give_exactly_the_epoch(digits, actions):
    run = Run(digits["val"])
    for action, value in actions:
        if action == "read":
            run.read(value)
        elif action == "save":
            run.save()
        else:
            run.stop()
        if action == "resize":
            run.world_size, run.batch_size = value
        elif action == "threads":
            run.num_threads, run.prefetch = value
    while run.read(1):
        pass
    run.save()
    run.stop()
    assert sorted(run.served) == list(range(EPOCH))
    with ImageLoader(digits["val"], batch_size=EPOCH, training=True, size=8) as loader:
        whole = next(iter(loader))
    assert all(torch.equal(image, run.served[position]) for position, image in enumerate(whole.images))


INTERRUPTED = """
import pickle
from datasvc.loaders import ImageLoader
split = pickle.loads({split!r})
try:
    with ImageLoader(split, batch_size=64, training=True, size=224) as loader:
        while True:
            for batch in loader:
                print(loader.state_dict()["position"], flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_in_the_middle_ends_the_process_at_once_and_leaves_no_thread_behind(digits):
    """A thread that went on would keep the process from its end."""
    code = INTERRUPTED.format(split=pickle.dumps(digits["train"]))
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "64\n"
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=30)[0]
    assert process.returncode == 0
    assert said.splitlines()[-1] == "interrupted"
