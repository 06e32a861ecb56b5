"""A training with Keras that sends itself a signal after a step, if there is one. KERAS_BACKEND names the backend."""

import os
import sys

import keras
import numpy as np
import torch

import datasvc
from datasvc.integrations.keras import KerasVersions, LoaderBatches
from datasvc.loaders import ImageLoader

BATCH, EPOCHS = 4, 3


class Interrupt(keras.callbacks.Callback):
    """Sends a signal after a number of batches of this process."""

    def __init__(self, after, number):
        super().__init__()
        self.left, self.number = after, number

    def on_train_batch_end(self, batch, logs=None):  # noqa: ARG002 - the signature is Keras's
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.number)


def make_model():
    keras.utils.set_random_seed(1)
    torch.manual_seed(1)  # on JAX, Keras does not seed torch, whose state a version has too
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3), name="pixels"),
            keras.layers.Flatten(name="flat"),
            keras.layers.Dropout(0.3, name="dropout"),
            keras.layers.Dense(4, name="scores"),
        ],
        name="net",
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss=loss)
    return model


def to_inputs(batch):
    return np.moveaxis(batch.images, 1, -1), batch.labels


def main(url, name, after, number):
    repo, model = datasvc.open(url), make_model()
    with ImageLoader(repo.dataset("pets@1")["train"], batch_size=BATCH, training=True, size=8) as loader:
        batches = LoaderBatches(loader, transform=to_inputs)
        with KerasVersions(repo, name, batches, every=2, grace="100s") as versions:
            callbacks = [Interrupt(after, number), versions]
            model.fit(batches, epochs=EPOCHS, initial_epoch=versions.restore(), callbacks=callbacks, verbose=0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
