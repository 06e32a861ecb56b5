"""Jobs of one node that ask for the same batches share one process that decodes them."""

from datasvc.loaders.decode_sharing.consumer import ShareCounts
from datasvc.loaders.decode_sharing.settings import DecodeGroup, parse_share
from datasvc.loaders.decode_sharing.sharing import Sharing

__all__ = ["DecodeGroup", "ShareCounts", "Sharing", "parse_share"]
