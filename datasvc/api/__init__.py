"""Facade of a repository: `repo.datasets` and `repo.models`. Most methods call functions of `shards` and `models`."""

from datasvc.api.data_repository import DataRepository
from datasvc.api.datasets import Datasets
from datasvc.api.models import Models

__all__ = ["DataRepository", "Datasets", "Models"]
