"""A batch of tokens as HTML for a notebook: the numbers of its first tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from datasvc.drawing import Markup, facts_table, html_table, standalone

if TYPE_CHECKING:
    from datasvc.loaders.tokens.token_batch import TokenBatch

_MAX_SAMPLES: Final = 8
_MAX_TOKENS: Final = 16


def batch_html(batch: TokenBatch[Any]) -> Markup:
    """Return the first tokens of the first samples, with positions and lengths."""
    count, block = len(batch.positions), int(batch.tokens.shape[1])
    facts = {"batch of token blocks": count, "tokens of a block": block, "epoch": batch.epoch}
    rows = [
        (
            int(batch.positions[index]),
            int(batch.length[index]),
            " ".join(map(str, batch.tokens[index][:_MAX_TOKENS].tolist())) + (" …" if block > _MAX_TOKENS else ""),
            "" if batch.mask[index] else "padding",
        )
        for index in range(min(count, _MAX_SAMPLES))
    ]
    return standalone(facts_table(facts), html_table(["position", "tokens", "first tokens", "state"], rows))
