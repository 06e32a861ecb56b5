"""Copy model versions to another repository; only objects that are missing there are transferred."""

from datasvc.models.transfer.copy_versions import Transferred, TransferReport, transfer

__all__ = ["TransferReport", "Transferred", "transfer"]
