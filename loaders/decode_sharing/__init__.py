"""Decode groups: jobs of one node that read the same batches decode each batch once, in one of them."""

from datasvc.loaders.decode_sharing.settings import DecodeGroup
from datasvc.loaders.decode_sharing.sharing import Sharing

__all__ = ["DecodeGroup", "Sharing"]
