"""Reference models of the training program, one family per module, and the registry that builds a model by name."""

from datasvc.trainer.recipes.models.convolutional import small_cnn
from datasvc.trainer.recipes.models.inception import LogitsWithAuxiliary, combine_losses, main_logits
from datasvc.trainer.recipes.models.registry import MODELS, build_model

__all__ = ["MODELS", "LogitsWithAuxiliary", "build_model", "combine_losses", "main_logits", "small_cnn"]
