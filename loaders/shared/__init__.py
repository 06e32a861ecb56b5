"""Jobs of one node that ask for the same batches share one process that decodes them."""

from loaders.shared.consumer import ShareCounts
from loaders.shared.settings import Share, parse_share
from loaders.shared.sharing import Sharing

__all__ = ["Share", "ShareCounts", "Sharing", "parse_share"]
