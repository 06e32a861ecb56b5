import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.drawing import FlowEdge, FlowNode, VersionNode, flow_graph, flow_table, version_graph, version_table
from datasvc.drawing.flow import plan_layers
from datasvc.drawing.versions import plan_lanes
from tests.drawing.hostile import local_name, parsed, text_of, texts, with_class


@st.composite
def histories(draw):
    """Versions, newest first, whose parents come later; some are not in the graph."""
    count = draw(st.integers(0, 12))
    parents = [draw(st.lists(st.integers(number + 1, count + 1), max_size=3)) for number in range(count)]
    return [VersionNode(f"v@{number}", tuple(f"v@{parent}" for parent in own)) for number, own in enumerate(parents)]


@given(histories())
def test_every_version_is_drawn_once_and_every_line_leads_down(nodes):
    root = parsed(version_graph(nodes))
    drawn = [
        next(each.text for each in node.iter() if local_name(each) == "text") for node in with_class(root, "node")
    ]
    assert drawn == [node.name for node in nodes]
    names = [node.name for node in nodes]
    lanes, edges = plan_lanes(names, [node.parents for node in nodes])
    expected = {
        (row, names.index(parent)) for row, node in enumerate(nodes) for parent in node.parents if parent in names
    }
    assert {(edge.child, edge.parent) for edge in edges} == expected
    assert all(edge.child < edge.parent for edge in edges)
    for edge in edges:  # a line passes beside the versions between its ends
        assert edge.travel not in lanes[edge.child + 1 : edge.parent]
        assert (lanes[edge.child], lanes[edge.parent]) == (edge.start, edge.stop)


def test_a_line_of_versions_has_one_lane_and_a_branch_a_second_one():
    assert plan_lanes(["c", "b", "a"], [["b"], ["a"], []])[0] == [0, 0, 0]
    lanes, edges = plan_lanes(["d", "c", "b", "a"], [["c", "b"], ["a"], ["a"], []])
    assert lanes == [0, 0, 1, 0]
    assert {(edge.child, edge.parent, edge.travel) for edge in edges} == {(0, 1, 0), (0, 2, 1), (1, 3, 0), (2, 3, 1)}


def test_a_page_of_ten_thousand_versions_draws_only_that_page():
    nodes = [VersionNode(f"m@{number}", (f"m@{number - 1}",)) for number in range(10_000, 0, -1)]
    text = version_graph(nodes, start=5000, limit=100, more_href="?start=5100")
    root = parsed(text)
    assert len(with_class(root, "node")) == 100
    assert "and 4,900 older versions" in text_of(root)
    assert len(text) < 100_000


def test_a_removed_version_is_hollow_and_an_unknown_parent_is_a_dashed_end():
    root = parsed(version_graph([VersionNode("a@2", ("a@1",), ("stable",), is_removed=True, href="/a@2")]))
    circles = [each.get("class") for each in root.iter() if local_name(each) == "circle"]
    assert circles == ["mark fill back", "line c0"]
    assert [each.get("stroke-dasharray") for each in root.iter() if local_name(each) == "path"] == ["2 3"]
    assert root.get("role") == "group"
    assert "stable" in text_of(with_class(root, "tag")[0])


@given(texts)
def test_hostile_names_of_versions_stay_text(text):
    nodes = [VersionNode(text or "x", (text,), (text,) * 8, text, text, title=text)]
    assert len(with_class(parsed(version_graph(nodes, title=text)), "node")) == 1
    parsed(version_table(nodes, caption=text))


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30),
    st.lists(st.integers(0, 3), min_size=10, max_size=10),
)
def test_edges_of_a_flow_lead_to_the_right_and_none_is_lost_but_those_of_cycles(pairs, columns):
    nodes = {f"n{number}": column for number, column in enumerate(columns)}
    edges = [(f"n{source}", f"n{target}") for source, target in pairs]
    plan = plan_layers(nodes, edges)
    layer = {name: number for number, names in enumerate(plan.layers) for name in names}
    assert sorted(name for name in layer if isinstance(name, str)) == sorted(nodes)
    for route in plan.routes.values():
        assert [layer[name] for name in route] == list(range(layer[route[0]], layer[route[-1]] + 1))
    if all(source < target for source, target in pairs):
        assert set(plan.routes) == set(edges)
    root = parsed(
        flow_graph(
            [FlowNode(name, column=column) for name, column in nodes.items()], [FlowEdge(*edge) for edge in edges]
        )
    )
    assert len(with_class(root, "node")) == 10


def test_an_order_with_no_crossing_is_found():
    columns = {"a": 0, "b": 0, "c": 0, "x": 1, "y": 1, "z": 1}
    plan = plan_layers(columns, [("a", "z"), ("b", "y"), ("c", "x")])
    assert plan.layers[0].index("a") == plan.layers[1].index("z")
    assert plan.layers[0].index("c") == plan.layers[1].index("x")


def test_very_many_nodes_collapse_into_one():
    nodes = [*(FlowNode(f"s{number}", kind="shard") for number in range(323)), FlowNode("v", column=1, href="/v")]
    edges = [FlowEdge(f"s{number}", "v") for number in range(323)]
    root = parsed(flow_graph(nodes, edges))
    assert "and 312 more" in text_of(root)
    assert len(with_class(root, "node")) == 13
    assert len(with_class(root, "edge")) == 12
    assert len(list(parsed(flow_table(nodes, edges)).iter("tr"))) == 324


@pytest.mark.parametrize("count", [0, 1])
def test_a_graph_without_edges_is_drawn(count):
    assert len(with_class(parsed(flow_graph([FlowNode("a")] * count, [])), "node")) == count


@given(texts)
def test_hostile_names_of_nodes_stay_text(text):
    nodes = [FlowNode(text, text, 0, text, text, title=text), FlowNode(text + "2", column=1)]
    edges = [FlowEdge(text, text + "2", text)]
    root = parsed(flow_graph(nodes, edges, title=text))
    assert (len(with_class(root, "node")), len(with_class(root, "edge"))) == (2, 1)
    parsed(flow_table(nodes, edges, caption=text))


def test_a_kind_has_one_colour_in_every_graph():
    model, source = FlowNode("m", kind="model"), FlowNode("s", kind="source", note="image-folder")

    def colour(nodes):
        """Return the classes of the frame of the last node."""
        (frame,) = with_class(with_class(parsed(flow_graph(nodes, [])), "node")[-1], "line")
        return frame.get("class")

    assert colour([model]) == colour([source, model])
    assert colour([source]) == colour([model, FlowNode("t", kind="source", note="parquet")])
    assert colour([source]) != colour([model])
    assert "image-folder" in text_of(parsed(flow_graph([source], [])))


@given(st.integers(1, 6), st.integers(1, 4))
def test_a_vertical_graph_leads_down_and_is_as_narrow_as_its_nodes(num_layers, num_nodes):
    nodes = [
        FlowNode(f"{layer}-{number}" * 9, column=layer) for layer in range(num_layers) for number in range(num_nodes)
    ]
    edges = [FlowEdge(a.name, b.name) for a in nodes for b in nodes if a.column + 1 == b.column]
    root = parsed(flow_graph(nodes, edges, is_vertical=True, max_per_column=2))
    boxes = [next(each for each in node.iter() if local_name(each) == "rect") for node in with_class(root, "node")]
    tops = sorted({float(box.get("y")) for box in boxes})
    assert len(tops) == num_layers
    assert max(sum(float(box.get("y")) == top for box in boxes) for top in tops) <= 2
    assert float(root.get("width")) <= 368  # of a window of 400 pixels, with its margins
    for line in with_class(root, "edge"):
        (_, start), *_, (_, stop) = re.findall(r"([\d.]+) ([\d.]+)", line.get("d"))
        assert float(start) < float(stop)
