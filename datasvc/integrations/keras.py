"""Keras 3 on JAX or torch: batches of a loader for `fit`, and a callback whose checkpoints are model versions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, Self

from datasvc.api import DataRepository
from datasvc.errors import ConfigError, MissingPackageError
from datasvc.extras import explain_missing
from datasvc.integrations.run_checkpoints import RANK_STATE, RunCheckpoints
from datasvc.trainer.recipes.random_state import capture

with explain_missing("datasvc.integrations.keras"):
    try:
        import keras
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        advice = "Keras computes with tensorflow by default, which is not installed; set KERAS_BACKEND=jax or =torch"
        raise MissingPackageError(advice, name=error.name) from error

__all__ = ["KerasVersions", "LoaderBatches"]

# What Keras takes to build a model: before 3.14, it copies two batches to the device of JAX ahead of time.
_IS_PREFETCHING: Final = keras.backend.backend() == "jax" and tuple(map(int, keras.__version__.split(".")[:2])) < (
    3,
    14,
)
_BUILD_BATCHES: Final = 2 if _IS_PREFETCHING else 1
_PARTS = ("trainable_variables", "non_trainable_variables", "optimizer_variables")


class LoaderBatches(keras.utils.PyDataset):
    """The batches of a loader of datasvc for `model.fit`, `evaluate` and `predict`, in the access order.

    An epoch of Keras is one of the loader. Keras's own shuffle has no effect. Keras may read ahead: the state has the
    position after the batches that were trained, as `KerasVersions` counts them, and each epoch of a training begins
    there; without `KerasVersions` after those that Keras has taken. Each evaluation begins at the first sample.

    Args:
        loader: loader of datasvc with `numpy()`, on the CPU.
        transform: makes `(inputs, targets)`, with weights as a third one if there are any, from a batch of NumPy
            arrays; by default `(inputs, labels)`. Images are `[batch, channel, height, width]`.

    Attributes:
        num_left: batches of the epoch that are not trained yet.
    """

    def __init__(self, loader: Any, *, transform: Callable[[Any], Any] = tuple) -> None:
        super().__init__(workers=1)
        self.loader, self._transform = loader, transform
        self._trained = loader.state_dict()
        self._handed: deque[Mapping[str, Any]] = deque()  # state after each batch that is handed over and not trained
        self._batches: Iterator[Any] = iter(())
        self._is_counted = self._has_begun = False  # by `KerasVersions`; an epoch that took a batch
        self._is_beginning, self.num_left = False, len(loader)
        self.split, self.batch_size = loader.split, loader.batch_size
        self.tail, self.ranks = loader.tail, loader.ranks

    @property
    def num_batches(self) -> int:
        """Number of batches of an epoch; at the begin of a resumed one, of the rest."""
        # Keras asks for the length of all epochs too; for the batches to read only before the first one of an epoch.
        return self.num_left if self._is_beginning else len(self.loader)

    def __getitem__(self, index: int) -> Any:
        self._is_beginning = False
        batch = next(self._batches)
        self._handed.append(self.loader.state_dict())
        return self._transform(batch)

    def on_epoch_begin(self) -> None:
        """Begin a training after the batches that were trained; at their end, with the next epoch."""
        # The first epoch that takes no more may be that in which Keras builds the model, and trains nothing.
        if self._handed and not self._is_counted:
            if self._has_begun or len(self._handed) > _BUILD_BATCHES:
                self._trained = self._handed[-1]
            self._has_begun = True
        self._handed.clear()
        self._batches = iter(())  # end the last iterator
        if self.loader.training:
            self.loader.load_state_dict(self._trained)
        self.num_left = self.loader.steps_left or len(self.loader)
        self._batches, self._is_beginning = self.loader.numpy(), True

    def count_trained(self, num_batches: int) -> int:
        """Count batches that were handed over as trained; return how many: `steps_per_execution` may pass the end."""
        self._is_counted = True
        num_trained = min(num_batches, len(self._handed))
        for _ in range(num_trained):
            self._trained = self._handed.popleft()
        self.num_left -= num_trained
        return num_trained

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader after the batches that were trained."""
        return dict(self._trained)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._handed.clear()
        self.loader.load_state_dict(state)
        self._trained = self.loader.state_dict()


class KerasVersions(keras.callbacks.Callback):
    """Saves the variables of a model and of its optimizer, and random states, while the training goes on.

        batches = LoaderBatches(loader)
        with KerasVersions(repo, "net", batches, every="10min", grace="30s") as versions:
            model.fit(batches, epochs=10, initial_epoch=versions.restore(), callbacks=[versions], verbose=0)

    The model is built and compiled as for the version: its variables are found by their paths. In the first, resumed
    epoch Keras warns that the input ran out of data, because this epoch is shorter than the others.

    Args:
        batches: batches that `fit` gets.
        **options: see `RunCheckpoints`.

    Attributes:
        checkpoints: the versions of the run: `version`, `newest()`, `stop_signal`.
    """

    def __init__(self, repo: DataRepository, name: str, batches: LoaderBatches, **options: Any) -> None:
        super().__init__()
        self.checkpoints = RunCheckpoints(repo, name, **options)
        self._batches = batches
        self._found: Any = None  # version to continue, until the training starts
        self._random: Any = None  # random states at the end of the last epoch, or of the version
        self._step = self._counted = 0  # steps of the weights, and of this epoch of Keras

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.checkpoints.close(error)

    def restore(self, ref: str | None = None) -> int:
        """Return the `initial_epoch` for `fit`, whose model then gets the state of a version; 0 without a version.

        Args:
            ref: a version or tag of any model; None: the newest of this one.
        """
        self._found = self.checkpoints.open().restore(ref, default=None)
        if self._found is not None:
            self._batches.load_state_dict(self._found.state["loader"])
        return int(self._batches.loader.epoch)

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - the signature is Keras's
        """Give the model the state of the version. By now its optimizer has its variables."""
        if self._found is not None:
            state, self._step = self._found.state, self._found.entry["step"]
            model = self.model
            for part in _PARTS:
                saved, own = _paths(state[part]), _paths(model.get_state_tree()[part])
                if saved != own:
                    different = ", ".join(sorted(saved ^ own)[:6])
                    raise ConfigError(
                        f"{self._found.version} was saved by a model with other variables, see {different}; build "
                        "and compile the same model, with the same names of its layers"
                    )
            model.set_state_tree({part: state[part] for part in _PARTS})
            self._random, self._found = state.get(RANK_STATE), None
        self.checkpoints.begin(self._batches, step=self._step)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Begin an epoch with the random states of the last one or of the version: Keras draws some between."""
        if batch == 0:
            self._counted = 0
            self.checkpoints.reinstate(self._random, 0, 1)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save if it is time; end the training after a signal."""
        # With `steps_per_execution`, Keras calls this after several steps.
        self._step += self._batches.count_trained(batch + 1 - self._counted)
        self._counted = batch + 1
        if not self._batches.num_left:
            self._random = [capture()]
        if self.checkpoints.is_due(self._step):
            self._save(logs)
        if self.checkpoints.stop_signal is not None:
            self.model.stop_training = True

    def on_train_end(self, logs: Any = None) -> None:
        """Save the last state, and wait until everything is committed."""
        self._save(logs)
        self.checkpoints.close()

    def _save(self, logs: Any) -> None:
        # A property of Keras's callback: it puts the state of a running epoch of JAX into the model.
        tree = self.model.get_state_tree(value_format="numpy_array")
        metrics = {name: float(value) for name, value in (logs or {}).items()}
        self.checkpoints.save({part: tree[part] for part in _PARTS}, step=self._step, metrics=metrics)


def _paths(tree: Any, prefix: str = "") -> set[str]:
    """Return the paths of the leaves of a nested dict."""
    if not isinstance(tree, Mapping):
        return {prefix}
    return {path for name, value in tree.items() for path in _paths(value, f"{prefix}/{name}")}
