"""Facade of a repository: `repo.datasets`, `repo.models`, `repo.runs`. Most methods call functions of these rooms."""

from datasvc.api.data_repository import DataRepository, Runs
from datasvc.api.datasets import Datasets
from datasvc.api.models import Models

__all__ = ["DataRepository", "Datasets", "Models", "Runs"]
