"""Versions of models that tests commit without tensors: what their entries say is all that matters."""

from datasvc.models.tensors.state_tree import encode_state
from datasvc.models.tensors.tensor_table import encode_table


def commit_entry(
    repository, name, *, parent=None, step=0, metrics=None, config=None, data=(), data_state=None, **about
):
    """Commit an entry; returns the version as text."""
    objects = repository.objects
    entry = {
        "step": step,
        "tensors": objects.put(encode_table([])).digest,
        "state": objects.put(encode_state({})).digest,
        "num_tensors": 0,
        "bytes": 0,
        "data": [{"dataset": each, "split": "train", "state": data_state or {}} for each in data],
        "code": {"revision": None, "dirty": False},
        "config": config or {},
        "metrics": metrics or {},
        "parent": parent,
        "message": "",
        **about,
    }
    return f"{name}@{repository.versions('models', name).append(lambda _head: entry).number}"
