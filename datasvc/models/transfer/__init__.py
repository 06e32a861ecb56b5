"""Model versions from one repository to another: only what is missing there moves."""

from datasvc.models.transfer.transfer import Transferred, TransferReport, transfer

__all__ = ["TransferReport", "Transferred", "transfer"]
