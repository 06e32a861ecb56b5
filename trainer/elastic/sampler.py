"""The public names of `horovod.torch.elastic.sampler`."""

from __future__ import annotations

from datasvc.trainer.elastic.elastic_sampler import ElasticSampler

__all__ = ["ElasticSampler"]
