"""What the entry of a version says about how ranks execute a run: layout, communication, and `--sync`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from datasvc.models import Execution
from datasvc.models.versions.metadata import Parallelism
from datasvc.planning.layout import AXES, Layout
from datasvc.trainer.optim.sync_policy import parse_sync

# By the kind of a policy of `sync`, what its rounds do beside averaging.
_OUTER_OPTIMIZERS: Final = {"diloco": "nesterov", "easgd": "center"}


def describe_execution(
    layout: Layout,
    *,
    zero: int | None = None,
    exchanges_heads: bool = False,
    sync: str = "bsp",
    tournament: Mapping[str, Any] | None = None,
) -> Execution:
    """Return what the entry of a version says about the execution of a run.

    Args:
        layout: layout of the ranks.
        zero: ZeRO stage of the settings.
        exchanges_heads: whether the ranks of the axis `tensor` exchange queries, keys and values.
        sync: the setting of this name.
        tournament: rounds and last comparison, see `Tournament.describe`.
    """
    # Parameters are sharded over both axes. ZeRO-1 sums whole gradients, and each rank sends the weights it updates.
    is_zero_1 = zero == 1
    is_sharded = layout.shard * layout.context > 1 and not is_zero_1
    policy = None if sync == "bsp" else parse_sync(sync)
    # Without the axis `replica`, each rank of `data` is a replica with steps of its own.
    data = 1 if policy is not None and layout.replica == 1 else layout.data
    communication = {
        # Stages of a pipeline sum the loss, the norm of the gradient, and the gradients of tied weights.
        "all-reduce": data > 1 or layout.tensor > 1 or layout.pipeline > 1 or is_zero_1,
        "reduce-scatter": is_sharded,
        "all-gather": is_sharded,
        "all-to-all": exchanges_heads,
        "broadcast": is_zero_1,
        "point-to-point": layout.pipeline > 1,
    }
    divides_model = layout.tensor * layout.pipeline * layout.context > 1
    divides_data = layout.num_data_ranks > 1
    parallelism: Parallelism = "hybrid"
    if not (divides_model and divides_data):
        parallelism = "model" if divides_model else "data" if divides_data else "none"
    used = [name for name, is_used in communication.items() if is_used]
    if policy is not None and divides_data:
        rounds = ["all-to-all", "all-gather"] if policy.codec is not None else ["all-reduce"]
        rounds = {"gossip": ["all-to-all"], "tournament": ["all-gather", "all-to-all"]}.get(policy.kind, rounds)
        used = list(dict.fromkeys([*rounds, *used]))
    return Execution(
        layout={axis: layout.size_of(axis) for axis in AXES},
        parallelism=parallelism,
        consistency="synchronous" if policy is None else "bounded",
        communication=", ".join(used),
        sync=sync,
        sync_steps=1 if policy is None else policy.steps,
        outer_optimizer="" if policy is None else _OUTER_OPTIMIZERS.get(policy.kind, ""),
        tournament=tournament or {},
    )
