"""Copies versions of models and data sets to another repository; transfers only the objects that it lacks."""

from datasvc.models.transfer.copy_datasets import transfer_datasets
from datasvc.models.transfer.copy_in_order import Transferred, TransferReport
from datasvc.models.transfer.copy_versions import transfer

__all__ = ["TransferReport", "Transferred", "transfer", "transfer_datasets"]
