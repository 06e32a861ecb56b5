"""Draws which rank of a mixed layout holds what, for the page "Layouts", from the plan of the layout.

Run it after a change: `python tools/draw_layout.py` writes docs/assets/layout-of-8-ranks.svg.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from datasvc.drawing.elements import Markup, element, markup, svg
from datasvc.planning.layout import Layout, RankLayout, plan_layout
from datasvc.trainer.recipes.layouts.pipeline import plan_stages

PICTURE: Final = Path(__file__).parents[1] / "docs" / "assets" / "layout-of-8-ranks.svg"
LAYOUT: Final = Layout(data=2, tensor=2, pipeline=2)
LAYERS: Final = "abcd"

_LEFT, _TOP, _RIGHT, _BOTTOM = 116, 92, 14, 44  # margins
_WIDTH, _HEIGHT = 168, 112  # of the box of a rank
_GAP_OF_TENSOR, _GAP_OF_DATA, _GAP_OF_PIPELINE = 8, 34, 44
_BAR_LEFT, _BAR_WIDTH, _BAR_HEIGHT, _BAR_STEP = 62, 96, 26, 34
_STYLE: Final = """
text{fill:#1b1b1b}.bold{font-weight:600}
.box{fill:#f4f4f4;stroke:#555}.line{stroke:#555;fill:none;stroke-width:1.5}.head{fill:#555}
.a{fill:#0072b2}.b{fill:#e69f00}.c{fill:#009e73}.d{fill:#cc79a7}.free{fill:none;stroke:#777;stroke-dasharray:4 3}
text.on{fill:#fff}text.dark{fill:#000}
@media (prefers-color-scheme:dark){text{fill:#eee}.box{fill:#26282c;stroke:#aaa}.line{stroke:#bbb}.head{fill:#bbb}
text.on{fill:#fff}text.dark{fill:#000}}
"""
_ON_DARK: Final = "a"  # layers whose colour needs white text


def draw_layout(layout: Layout, layers: str) -> Markup:
    """Return a picture of a layout with the axes data, tensor and pipeline.

    Args:
        layout: layout; its other axes have the size 1.
        layers: a letter for each layer, as many as the stages divide evenly.
    """
    plan = plan_layout(layout)
    ranks = [_draw_rank(rank, layout, layers) for rank in plan.ranks]
    width = _box_left(layout.data - 1, layout.tensor - 1, layout) + _WIDTH + _RIGHT
    height = _box_top(layout.pipeline - 1) + _HEIGHT + _BOTTOM
    return svg(
        element("style", Markup(_STYLE)),
        _arrow_head(),
        _text(
            10, 22, f"What each of the {layout.size} ranks holds with --layout {layout}", class_="bold", font_size=14
        ),
        *(_draw_data_rank(index, layout) for index in range(layout.data)),
        *(_draw_stage(index, layout, layers) for index in range(layout.pipeline)),
        *ranks,
        _text(
            10,
            height - 14,
            "A filled cell is a part that the rank has. Arrows: activations; their gradients go the other way.",
        ),
        width=width,
        height=height,
        title=f"The layout {layout}",
        description="; ".join(_describe(rank, layout, layers) for rank in plan.ranks) + ".",
    )


def layers_of(rank: RankLayout, layout: Layout, layers: str) -> str:
    """Return the letters of the layers that a rank computes."""
    (stage,) = plan_stages(rank.coordinates["pipeline"], layout.pipeline, "1f1b")
    per_stage = len(layers) // layout.pipeline
    return layers[stage * per_stage : (stage + 1) * per_stage]


def _describe(rank: RankLayout, layout: Layout, layers: str) -> str:
    part = f"part {rank.coordinates['tensor']} of layers {' and '.join(layers_of(rank, layout, layers))}"
    return f"Rank {rank.rank} has {part}, and computes batch {rank.data_rank}"


def _box_left(data: int, tensor: int, layout: Layout) -> int:
    width_of_group = layout.tensor * (_WIDTH + _GAP_OF_TENSOR) - _GAP_OF_TENSOR
    return _LEFT + data * (width_of_group + _GAP_OF_DATA) + tensor * (_WIDTH + _GAP_OF_TENSOR)


def _box_top(stage: int) -> int:
    return _TOP + stage * (_HEIGHT + _GAP_OF_PIPELINE)


def _draw_rank(rank: RankLayout, layout: Layout, layers: str) -> Markup:
    """Return the box of a rank: its number, its batch, and the part of each layer that it has."""
    coordinates = rank.coordinates
    tensor = coordinates["tensor"]
    left, top = _box_left(coordinates["data"], tensor, layout), _box_top(coordinates["pipeline"])
    parts = [
        element("rect", class_="box", x=left, y=top, width=_WIDTH, height=_HEIGHT, rx=4),
        _text(left + 10, top + 22, f"rank {rank.rank}", class_="bold"),
        _text(left + _WIDTH - 10, top + 22, f"batch {rank.data_rank}", text_anchor="end"),
    ]
    cell_width = _BAR_WIDTH / layout.tensor
    for number, layer in enumerate(layers_of(rank, layout, layers)):
        y = top + 36 + number * _BAR_STEP
        parts.append(_text(left + 10, y + 18, f"layer {layer}"))
        for index in range(layout.tensor):
            x, is_own = left + _BAR_LEFT + index * cell_width, index == tensor
            kind = layer if is_own else "free"
            parts.append(element("rect", class_=kind, x=x + 1, y=y, width=cell_width - 2, height=_BAR_HEIGHT, rx=3))
            if is_own:
                tone = "on" if layer in _ON_DARK else "dark"
                label = f"{layer}{index}"
                parts.append(_text(x + cell_width / 2, y + 18, label, class_=tone, text_anchor="middle"))
    if coordinates["pipeline"] + 1 < layout.pipeline:
        x, y = left + _WIDTH / 2, top + _HEIGHT
        path = f"M{x:g} {y + 4}V{y + _GAP_OF_PIPELINE - 4}"
        parts.append(element("path", class_="line", d=path, marker_end="url(#head)"))
    return element("g", *parts, id=f"rank-{rank.rank}")


def _draw_data_rank(index: int, layout: Layout) -> Markup:
    """Return the heads above the columns of a data rank."""
    left, right = _box_left(index, 0, layout), _box_left(index, layout.tensor - 1, layout) + _WIDTH
    parts = [
        _text((left + right) / 2, 48, f"data {index}: batch {index}", class_="bold", text_anchor="middle"),
        element("path", class_="line", d=f"M{left} 60V56H{right}V60"),
    ]
    parts += [
        _text(_box_left(index, tensor, layout) + _WIDTH / 2, 80, f"tensor {tensor}", text_anchor="middle")
        for tensor in range(layout.tensor)
    ]
    return markup(parts)


def _draw_stage(index: int, layout: Layout, layers: str) -> Markup:
    """Return the text beside the row of a stage."""
    rank = next(each for each in plan_layout(layout).ranks if each.coordinates["pipeline"] == index)
    y = _box_top(index) + _HEIGHT / 2
    shown = f"layers {' '.join(layers_of(rank, layout, layers))}"
    return markup([_text(10, y - 4, f"pipeline {index}", class_="bold"), _text(10, y + 14, shown)])


def _arrow_head() -> Markup:
    return element(
        "defs",
        element(
            "marker",
            element("path", class_="head", d="M0 0L8 4L0 8z"),
            id="head",
            viewBox="0 0 8 8",
            refX=7,
            refY=4,
            markerWidth=7,
            markerHeight=7,
            orient="auto",
        ),
    )


def _text(x: float, y: float, text: str, **attributes: str | float) -> Markup:
    return element("text", text, x=x, y=y, **attributes)


if __name__ == "__main__":
    PICTURE.write_text(draw_layout(LAYOUT, LAYERS) + "\n", encoding="utf-8")
