"""A training with JAX that ends itself after a step, if there is one."""

import os
import signal
import sys

import jax

import datasvc
from datasvc.integrations.jax import batches, from_state, to_state
from datasvc.loaders import ImageLoader
from datasvc.models import ConsumptionTracker

BATCH, EPOCHS = 4, 2


def loss_of(params, images, labels):
    scores = images.reshape(len(images), -1) @ params["weight"] + params["bias"]
    return -jax.nn.log_softmax(scores)[jax.numpy.arange(len(labels)), labels].mean()


@jax.jit
def update(train, images, labels):
    key, drawn = jax.random.split(train["key"])
    images = images + 0.01 * jax.random.normal(drawn, images.shape)
    gradients = jax.grad(loss_of)(train["params"], images, labels)
    moments = jax.tree.map(lambda moment, gradient: 0.9 * moment + gradient, train["moments"], gradients)
    params = jax.tree.map(lambda param, moment: param - 0.01 * moment, train["params"], moments)
    return {"key": key, "params": params, "moments": moments}


def main(url, name, killed_after):
    repo = datasvc.open(url)
    params = {"weight": jax.numpy.zeros((3 * 8 * 8, 4)), "bias": jax.numpy.zeros(4)}
    train = {"key": jax.random.key(0), "params": params, "moments": jax.tree.map(jax.numpy.zeros_like, params)}
    split = repo.dataset("pets@1")["train"]
    with (
        ImageLoader(split, batch_size=BATCH, training=True, size=8) as loader,
        repo.models.manager(name, every=2) as model,
    ):
        found, step = model.restore(default=None), 0
        if found is not None:
            step, train = found.entry["step"], from_state(found.state["train"], train)
            loader.load_state_dict(found.state["loader"])
        reading = ConsumptionTracker(loader, step=step)
        while loader.epoch < EPOCHS:
            for images, labels in batches(loader):
                train = update(train, images, labels)
                step += 1
                is_last = loader.epoch == EPOCHS - 1 and not loader.steps_left
                if model.should_save(step) or is_last:
                    state = {"train": to_state(train), "loader": loader.state_dict()}
                    model.save(state, step=step, data=[reading.use()], wait=True)
                if step == killed_after:
                    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
