"""`RayExecutor`, as `horovod.ray` has it: a data-parallel job of `datasvc.trainer` whose ranks are actors of Ray."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasvc.errors import ConfigError
from datasvc.extras import explain_missing
from datasvc.trainer.env.environment import placement_variables
from datasvc.trainer.launch.ranks.job import Host
from datasvc.trainer.launch.ranks.placement import place_ranks
from datasvc.trainer.launch.ranks.store import AGENT_STORE, open_listener, serve_store

with explain_missing("datasvc.integrations.ray_executor"):
    import ray
    from ray.util import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

__all__ = ["RayExecutor"]

Args = Sequence[Any] | None
Kwargs = Mapping[str, Any] | None


@dataclass(frozen=True)
class ExecutorSettings:
    """Seconds in which all ranks must meet in `hvd.init()`, and in which Ray must have the resources for them."""

    timeout_s: int = 30
    placement_group_timeout_s: int = 100


class RayExecutor:
    """Starts ranks as actors, and calls functions on all of them, which may use `datasvc.trainer` as `hvd`.

    A lost rank ends the call with an error. Then call `shutdown` and `start`, and continue from the newest version.

    Args:
        settings: see `create_settings`; None: the defaults.
        num_workers: number of ranks, on as few nodes as possible.
        cpus_per_worker: processors of each rank.
        use_gpu: whether each rank gets GPUs.
        gpus_per_worker: GPUs of each rank with `use_gpu`, by default 1. As with Horovod, the ranks of a node see all
            their GPUs; use `torch.cuda.set_device(hvd.local_rank())`.
        num_hosts: number of nodes, in place of `num_workers`.
        num_workers_per_host: ranks of each of these nodes.

    Raises:
        ConfigError: the arguments contradict each other.
    """

    def __init__(
        self,
        settings: ExecutorSettings | None = None,
        num_workers: int | None = None,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
    ) -> None:
        if (num_workers is None) == (num_hosts is None):
            raise ConfigError("give either num_workers, or num_hosts with num_workers_per_host")
        if min(1 if num_workers is None else num_workers, num_hosts or 1, num_workers_per_host) < 1:
            raise ConfigError("num_workers, num_hosts and num_workers_per_host must be 1 or more")
        if gpus_per_worker is not None and (not use_gpu or gpus_per_worker < 1):
            raise ConfigError("gpus_per_worker must be 1 or more, and needs use_gpu=True")
        self._settings = settings or ExecutorSettings()
        self._num_ranks = num_workers or (num_hosts or 0) * num_workers_per_host
        gpus = {"GPU": float(gpus_per_worker or 1)} if use_gpu else {}
        self._resources = {"CPU": float(cpus_per_worker)} | gpus
        # A bundle is on one node: one for each rank, or one for all ranks of a node.
        self._ranks_per_bundle = 1 if num_hosts is None else num_workers_per_host
        self._strategy = "PACK" if num_hosts is None else "STRICT_SPREAD"
        self._group: Any = None
        self.workers: list[Any] = []

    @classmethod
    def create_settings(cls, timeout_s: int = 30, placement_group_timeout_s: int = 100) -> ExecutorSettings:
        """Return settings for `RayExecutor`. Horovod's arguments for ssh have no part here: Ray starts the ranks."""
        return ExecutorSettings(timeout_s, placement_group_timeout_s)

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Args = None,
        executable_kwargs: Kwargs = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the ranks, and make an object on each of them.

        Args:
            executable_cls: class of the objects that `execute` passes to functions; None: no objects.
            executable_args: arguments of the class.
            executable_kwargs: keyword arguments of the class.
            extra_env_vars: further environment variables.

        Raises:
            ConfigError: the ranks run already, or Ray has no resources for them in time.
        """
        if self._group is not None:
            raise ConfigError("the ranks are started already; call shutdown first")
        bundle = {name: count * self._ranks_per_bundle for name, count in self._resources.items()}
        self._group = placement_group([bundle] * (self._num_ranks // self._ranks_per_bundle), self._strategy)
        try:
            self._place()
            made = executable_cls, executable_args, executable_kwargs
            ray.get([worker.start.remote(extra_env_vars or {}, *made) for worker in self.workers])
        except BaseException:
            self.shutdown()
            raise

    def _place(self) -> None:
        """Create the actors, give them ranks node by node, and tell them where rank 0 serves the job's store."""
        timeout_s = self._settings.placement_group_timeout_s
        if not self._group.wait(timeout_s):
            raise ConfigError(
                f"Ray has no resources for {self._num_ranks} ranks with {self._resources} each within {timeout_s} s; "
                f"it has {ray.cluster_resources()}: start fewer ranks, or more nodes"
            )
        actors = []
        for index in range(self._num_ranks):
            place = PlacementGroupSchedulingStrategy(self._group, index // self._ranks_per_bundle)
            options = {"num_cpus": self._resources["CPU"], "num_gpus": self._resources.get("GPU", 0)}
            actors.append(ray.remote(RankActor).options(scheduling_strategy=place, **options).remote())
        by_node: dict[str, list[tuple[Any, list[str]]]] = {}
        for actor, (node, gpus) in zip(actors, ray.get([each.describe.remote() for each in actors]), strict=True):
            by_node.setdefault(node, []).append((actor, gpus))
        self.workers = [actor for members in by_node.values() for actor, _ in members]
        address, port = ray.get(self.workers[0].serve_store.remote(self._num_ranks))
        shared = {"HOROVOD_START_TIMEOUT": str(self._settings.timeout_s), **AGENT_STORE}
        shared |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        ranks = place_ranks(self._num_ranks, [Host(node, len(members)) for node, members in by_node.items()])
        pending = []
        for worker, rank in zip(self.workers, ranks, strict=True):
            gpus = sorted({gpu for _, gpus in by_node[rank.host] for gpu in gpus})
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
            pending.append(worker.start.remote(placement_variables(rank.placement) | visible | shared))
        ray.get(pending)

    def execute(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Call `fn(executable)` on every rank, and return the results in rank order."""
        return list(ray.get([worker.execute.remote(fn) for worker in self._started()]))

    def run(self, fn: Callable[..., Any], args: Args = None, kwargs: Kwargs = None) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank, and return the results in rank order."""
        return list(ray.get(self.run_remote(fn, args, kwargs)))

    def run_remote(self, fn: Callable[..., Any], args: Args = None, kwargs: Kwargs = None) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank, and return references for `ray.get` at once, in rank order."""
        given, named = list(args or ()), dict(kwargs or {})
        return [worker.execute.remote(lambda _: fn(*given, **named)) for worker in self._started()]

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call `fn(executable)` on rank 0, and return its result."""
        return ray.get(self._started()[0].execute.remote(fn))

    def shutdown(self) -> None:
        """End the ranks and give their resources back. `start` may be called again."""
        for worker in self.workers:
            ray.kill(worker)
        self.workers = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _started(self) -> list[Any]:
        if not self.workers:
            raise ConfigError("there are no ranks; call start first")
        return self.workers


class RankActor:
    """One rank, an actor of Ray."""

    _executable: Any = None
    _store: Any = None

    def describe(self) -> tuple[str, list[str]]:
        """Return the id of the node, and the GPUs of this rank."""
        return ray.get_runtime_context().get_node_id(), [str(gpu) for gpu in ray.get_gpu_ids()]

    def serve_store(self, num_ranks: int) -> tuple[str, int]:
        """Serve the store through which the ranks meet; return its address and port."""
        with open_listener(num_ranks, for_other_hosts=True) as listener:
            self._store = serve_store(listener)
            return ray.util.get_node_ip_address(), listener.getsockname()[1]

    def start(self, variables: Mapping[str, str], make: Any = None, args: Args = None, kwargs: Kwargs = None) -> None:
        """Set environment variables, and make the object that `execute` passes on."""
        os.environ.update(variables)
        self._executable = None if make is None else make(*(args or ()), **(kwargs or {}))

    def execute(self, fn: Callable[[Any], Any]) -> Any:
        """Call a function with the object."""
        return fn(self._executable)
