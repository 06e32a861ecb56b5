"""Model versions from one repository to another: only what is missing there moves."""

from datasvc.models.transfer.copy_versions import Transferred, TransferReport, transfer

__all__ = ["TransferReport", "Transferred", "transfer"]
