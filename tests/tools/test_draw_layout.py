"""The picture of a mixed layout has what the plan of the layout says."""

from xml.etree import ElementTree as ET

import pytest

from datasvc.planning.layout import Layout, plan_layout
from tools.draw_layout import LAYERS, LAYOUT, PICTURE, draw_layout

NAMESPACE = "{http://www.w3.org/2000/svg}"


def texts_of_ranks(picture):
    groups = {group.get("id"): group for group in ET.fromstring(picture).iter(f"{NAMESPACE}g")}
    return {name: [text.text for text in group.iter(f"{NAMESPACE}text")] for name, group in groups.items()}


@pytest.mark.parametrize("layout", [LAYOUT, Layout(data=3, tensor=4), Layout(pipeline=4), Layout()], ids=str)
def test_each_rank_of_the_picture_has_the_layers_parts_and_batch_of_the_plan(layout):
    picture = draw_layout(layout, LAYERS)
    expected = {}
    for rank in plan_layout(layout).ranks:
        stage, tensor = rank.coordinates["pipeline"], rank.coordinates["tensor"]
        own = [layer for number, layer in enumerate(LAYERS) if number * layout.pipeline // len(LAYERS) == stage]
        labels = [label for layer in own for label in (f"layer {layer}", f"{layer}{tensor}")]
        expected[f"rank-{rank.rank}"] = [f"rank {rank.rank}", f"batch {rank.data_rank}", *labels]
    assert texts_of_ranks(picture) == expected


def test_every_part_of_every_layer_is_on_one_rank_of_each_data_rank():
    held = [
        (texts[1], label) for texts in texts_of_ranks(draw_layout(LAYOUT, LAYERS)).values() for label in texts[3::2]
    ]
    assert sorted(held) == sorted(
        (f"batch {data}", f"{layer}{part}")
        for data in range(LAYOUT.data)
        for layer in LAYERS
        for part in range(LAYOUT.tensor)
    )


def test_the_picture_of_the_page_is_the_one_that_is_drawn():
    assert PICTURE.read_text(encoding="utf-8") == draw_layout(LAYOUT, LAYERS) + "\n", "run tools/draw_layout.py"
