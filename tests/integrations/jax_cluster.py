"""Two processes of JAX that read one split: each writes the global labels that it computed with."""

import multiprocessing
import sys

from tests.support.ports import reserved_ports


def read(process, port, url, folder):
    import jax
    import numpy as np

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
    import datasvc
    from datasvc.integrations.jax import batches, ranks
    from datasvc.loaders import ImageLoader

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    gather = jax.jit(lambda array: array, out_shardings=replicated)
    options = {"batch_size": 2, "training": True, "size": 8, "ranks": ranks()}
    with ImageLoader(datasvc.open(url).dataset("pets@1")["train"], **options) as loader:
        labels = [np.array(gather(labels).addressable_data(0)) for _, labels in batches(loader, sharding)]
    np.savez(f"{folder}/{process}.npz", **{"global": np.concatenate(labels)})


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with reserved_ports(1) as (port,):
        processes = [context.Process(target=read, args=(number, port, *sys.argv[1:])) for number in range(2)]
        for each in processes:
            each.start()
        for each in processes:
            each.join()
    sys.exit(max(abs(each.exitcode) for each in processes))
