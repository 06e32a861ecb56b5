"""The models of the surveys, one family per file, and how a run names them."""

from trainer.recipes.models.auxiliary import LogitsWithAuxiliary, combine_losses, main_logits
from trainer.recipes.models.registry import MODELS, build_model
from trainer.recipes.models.small_cnn import small_cnn

__all__ = ["MODELS", "LogitsWithAuxiliary", "build_model", "combine_losses", "main_logits", "small_cnn"]
