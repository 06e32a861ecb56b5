"""Two ranks that do not commit before they have heard of a change of hosts."""

import sys
import threading

import datasvc.trainer as hvd


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class State(hvd.elastic.ObjectState):
    """Notes that it was told of a change."""

    was_told = threading.Event()

    def on_hosts_updated(self, timestamp, update_res):
        super().on_hosts_updated(timestamp, update_res)
        say("told of", update_res, "before a commit, with", self._host_messages.qsize(), "message")
        self.was_told.set()


hvd.init()
state = State(step=0)


@hvd.elastic.run
def train(state):
    if hvd.size() == 2:
        say("trains on as rank", hvd.rank())
        assert state.was_told.wait(60)
        state.step += 1
        state.commit()
        raise AssertionError("the commit goes on although hosts have changed")


train(state)
say("ends at", state.step, "with last change", state._last_updated_timestamp)
