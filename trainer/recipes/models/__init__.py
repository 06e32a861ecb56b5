"""The models of the surveys, one family per file, and how a run names them."""

from datasvc.trainer.recipes.models.auxiliary import LogitsWithAuxiliary, combine_losses, main_logits
from datasvc.trainer.recipes.models.registry import MODELS, build_model
from datasvc.trainer.recipes.models.small_models import small_cnn

__all__ = ["MODELS", "LogitsWithAuxiliary", "build_model", "combine_losses", "main_logits", "small_cnn"]
