"""Copies model versions to another repository; transfers only the objects that are missing there."""

from datasvc.models.transfer.copy_versions import Transferred, TransferReport, transfer

__all__ = ["TransferReport", "Transferred", "transfer"]
