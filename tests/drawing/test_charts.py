import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.drawing import (
    ChartMark,
    ChartSeries,
    HistogramBin,
    NamedBar,
    bar_chart,
    bar_table,
    chart_table,
    format_quantity,
    heat_map,
    heat_map_table,
    histogram,
    histogram_table,
    line_chart,
    separate_charts,
    small_multiples,
    stacked_areas,
    value_head,
)
from datasvc.drawing.elements import shorten_to_width, text_width
from datasvc.drawing.numbers import choose_ticks, thin_points
from tests.drawing.hostile import local_name, parsed, text_of, texts, with_class

values = st.floats(-1e300, 1e300) | st.just(math.nan) | st.none()


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=20), st.booleans())
def test_heights_of_bars_are_proportional_to_their_counts(counts, is_small):
    bins = [HistogramBin(number, number + 1, count) for number, count in enumerate(counts)]
    heights = [
        float(each.get("height")) for each in with_class(parsed(histogram(bins, title="x", is_small=is_small)), "bar")
    ]
    assert len(heights) == len(counts)
    scale = max(heights) / (max(counts) or 1)
    assert heights == pytest.approx([count * scale for count in counts], abs=0.01)
    assert max(heights) > 0 or max(counts) == 0


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=20))
def test_lengths_of_named_bars_are_proportional_and_the_table_has_the_same_numbers(counts):
    bars = [NamedBar(f"class {number}", count) for number, count in enumerate(counts)]
    lengths = [float(each.get("width")) for each in with_class(parsed(bar_chart(bars, title="x")), "bar")]
    scale = max(lengths) / (max(counts) or 1)
    assert lengths == pytest.approx([count * scale for count in counts], abs=0.01)
    cells = [each.text for each in parsed(bar_table(bars, title="x")).iter("td") if each.get("class") == "number"]
    assert cells == [f"{count:,}" for count in counts]


def test_a_bar_with_an_address_is_a_link_over_its_whole_height():
    root = parsed(
        histogram([HistogramBin(0, 1, 1, "?a"), HistogramBin(1, 2, 1000, "?b", is_selected=True)], title="x")
    )
    links = [each for each in root.iter() if local_name(each) == "a"]
    assert [each.get("href") for each in links] == ["?a", "?b"]
    assert links[0].get("aria-label") == "0 to 1: 1 samples"
    assert root.get("role") == "group"
    assert "c1" in with_class(links[1], "bar")[0].get("class").split()


def test_small_counts_are_visible_on_a_log_scale():
    root = parsed(histogram([HistogramBin(0, 1, 1), HistogramBin(1, 2, 10**6)], title="x", log_scale=True))
    low, high = (float(each.get("height")) for each in with_class(root, "bar"))
    assert low / high == pytest.approx(math.log(2) / math.log1p(10**6), rel=0.01)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1_500_000_000, "bytes", "1.5 GB"),
        (400_000, "bytes/s", "400 kB/s"),
        (1_254_000, "bytes", "1.25 MB"),
        (12.5, "bytes", "12.5 bytes"),
        (2000, "bytes/s", "2 kB/s"),
        (12500, "samples", "12,500 samples"),
        (0.0123456, "s", "0.01235 s"),
        (50, "%", "50%"),
        (math.nan, "s", "no value"),
        (None, "", "no value"),
        (math.inf, "", "inf"),
    ],
)
def test_a_quantity_has_its_unit(value, unit, text):
    assert format_quantity(value, unit) == text


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
def test_ticks_cover_the_range_with_few_numbers(low, high):
    low, high = sorted((low, high))
    ticks = choose_ticks(low, high)
    assert ticks == sorted(ticks)
    assert ticks[0] < ticks[-1] or low == high
    assert 2 <= len(ticks) <= 8
    tolerance = (ticks[-1] - ticks[0]) * 1e-6
    assert ticks[0] <= low + tolerance
    assert ticks[-1] >= high - tolerance


@given(st.lists(values, max_size=300))
def test_thinning_keeps_the_extremes_and_the_order(ys):
    points = thin_points(range(len(ys)), ys, 50)
    assert len(points) <= 80
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    known = [y for y in ys if y is not None and math.isfinite(y)]
    kept = [y for _, y in points if y is not None]
    assert (min(kept, default=None), max(kept, default=None)) == (min(known, default=None), max(known, default=None))


EXTREMES = [5e-324, 1e16, 1e16 + 2, 1.7e308, -1.7e308, math.inf, -math.inf, math.nan, 10**16, 10**16 + 1]
numbers = st.floats() | st.sampled_from(EXTREMES)


@given(st.lists(st.lists(st.tuples(numbers, st.none() | numbers), max_size=6), max_size=3), numbers)
def test_any_numbers_are_drawn_as_lines_and_areas(columns, at):
    lines = []
    for number, points in enumerate(columns):
        xs = sorted((x for x, _ in points), key=lambda x: (math.isnan(x), x))
        lines.append(ChartSeries(f"s{number}", xs, [y for _, y in points]))
    areas = lines[:1] * 3  # their `xs` are equal
    check_finite(line_chart(lines, title="x", marks=[ChartMark(at, "mark")]))
    check_finite(small_multiples(lines, title="x", same_range=at > 0))
    check_finite(stacked_areas(areas, title="x"))
    parsed(chart_table(lines, title="x"))


@given(st.lists(numbers, max_size=6), st.booleans())
def test_any_numbers_are_drawn_as_bars_and_cells(sizes, log_scale):
    bounds = sorted(sizes, key=lambda value: (math.isnan(value), value))
    bins = [HistogramBin(*ends, count) for *ends, count in zip(bounds, bounds[1:], sizes, strict=False)]
    bars = [NamedBar("b", size) for size in sizes]
    names = [str(number) for number in range(len(sizes))]
    check_finite(histogram(bins, title="x", log_scale=log_scale))
    check_finite(histogram(bins, title="x", log_scale=log_scale, is_small=True))
    check_finite(bar_chart(bars, title="x"))
    check_finite(heat_map(["r"], names, [sizes], title="x", log_scale=log_scale))
    for table in (
        histogram_table(bins, title="x"),
        bar_table(bars, title="x"),
        heat_map_table(["r"], names, [sizes], title="x"),
    ):
        parsed(table)


def check_finite(drawing):
    """Fail if a coordinate, a length or an opacity of a drawing is no number, or a length is negative."""
    for each in parsed(drawing).iter():
        for name, text in each.attrib.items():
            if name in {"x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height", "fill-opacity"}:
                assert math.isfinite(float(text))
                assert float(text) >= 0 or name not in {"width", "height"}
            assert name not in {"d", "points"} or not re.search("nan|inf", text)


def test_a_gap_divides_a_line_and_a_mark_is_in_its_place():
    root = parsed(
        line_chart(
            [ChartSeries("a", [0, 1, 2, 3], [1, math.nan, 2, 3])], title="x", marks=[ChartMark(1.5, "stall", True)]
        )
    )
    (line,) = (each for each in root.iter() if local_name(each) == "path")
    assert line.get("d").count("M") == 2
    (mark,) = (each for each in with_class(root, "problem") if local_name(each) == "line")
    (first, *_, last) = (float(each.get("cx")) for each in root.iter() if local_name(each) == "circle")
    assert float(mark.get("x1")) == pytest.approx((first + last) / 2)


def test_bytes_and_rates_begin_at_zero():
    series = [ChartSeries("a", [0, 1], [100.0, 101.0])]
    shown = [text_of(parsed(line_chart(series, title="x", unit=unit))) for unit in ("bytes", "images/s", "loss")]
    assert ["x (loss)" in text for text in shown] == [False, False, True]
    assert "0 bytes" in shown[0]
    assert "(images/s) 0 50" in shown[1]
    assert "100.2" in shown[2]


def test_small_multiples_with_the_same_range_can_be_compared():
    series = [ChartSeries("a", [0, 1], [1, 2]), ChartSeries("b", [0, 1], [1, 200])]

    def heights(**options):
        root = parsed(small_multiples(series, title="x", **options))
        return [float(each.get("cy")) for each in root.iter() if local_name(each) == "circle"]

    low, high, other_low, other_high = heights(same_range=True)
    assert low == other_low
    assert low - high < (other_low - other_high) / 100
    low, high, other_low, other_high = heights()
    assert low - high > (other_low - other_high) / 2


def test_stacked_areas_stand_on_each_other():
    series = [ChartSeries("a", [0, 1], [1, 2]), ChartSeries("b", [0, 1], [3, None])]
    polygons = [
        each.get("points").split()
        for each in parsed(stacked_areas(series, title="x")).iter()
        if local_name(each) == "polygon"
    ]
    upper_of_a, lower_of_b = polygons[0][:2], polygons[1][2:][::-1]
    assert upper_of_a == lower_of_b
    assert polygons[1][1] == polygons[1][2]  # None has no height


@pytest.mark.parametrize("draw", [line_chart, stacked_areas])
def test_a_hover_shows_all_series_at_a_point(draw):
    xs = range(250)
    series = [ChartSeries("read", xs, [1.0] * 250), ChartSeries("decode", xs, [*range(249), None])]
    strips = with_class(parsed(draw(series, title="x", unit="ms")), "hover")
    assert len(strips) == 84  # every third point
    assert text_of(strips[1]) == "step 3; read: 1 ms; decode: 3 ms"
    ends = [(float(each.get("x")), float(each.get("width"))) for each in strips]
    left, right = ends[0][0], sum(ends[-1])
    assert 0 < left < right < 640
    assert (strips[1].get("data-x"), float(strips[1].get("data-at"))) == (
        "3",
        pytest.approx(left + 3 / 249 * (right - left), abs=0.01),
    )
    assert [text_of(key) for key in with_class(parsed(draw(series, title="x")), "key")] == ["read", "decode"]
    assert all(x + width == pytest.approx(after, abs=0.02) for (x, width), (after, _) in pairwise(ends))


def test_lines_with_steps_of_their_own_have_no_common_hover():
    lines = [ChartSeries("a", [0, 1], [1, 2]), ChartSeries("b", [0, 2], [1, 2])]
    assert not with_class(parsed(line_chart(lines, title="x")), "hover")
    assert len(with_class(parsed(line_chart(lines[:1], title="x")), "hover")) == 2


def test_many_points_are_thinned():
    xs = range(100_000)
    series = [ChartSeries("a", xs, [float(x % 7) for x in xs])] * 2
    assert len(line_chart(series, title="x")) < 100_000
    assert len(stacked_areas(series, title="x")) < 200_000
    root = parsed(chart_table(series[:1], title="x", max_rows=10))
    assert len(list(root.iter("tr"))) == 11
    assert "the last 10 of 100,000" in text_of(root)


def test_the_opacity_of_a_cell_grows_with_its_value():
    root = parsed(heat_map(["a"], ["1", "2", "3", "4"], [[0.5, 1.0, None, math.nan]], title="x"))
    assert [float(each.get("fill-opacity")) for each in with_class(root, "cell")] == [0.5, 1, 0, 0]
    root = parsed(heat_map(["a"], ["1", "2", "3"], [[0, 1e-6, 1.0]], title="x", log_scale=True))
    zero, small, large = (float(each.get("fill-opacity")) for each in with_class(root, "cell"))
    assert zero < small < large == 1
    assert "and 4 more" in text_of(parsed(heat_map(["a"] * 5, ["b"], [[1.0]] * 5, title="x", max_rows=1)))


@given(texts)
def test_hostile_names_in_charts_stay_text(text):
    series = [ChartSeries(text, [0, 1], [1.0, 2.0], href=text)]
    charts = [
        line_chart(series, title=text, unit=text, x_label=text, marks=[ChartMark(0.5, text, href=text)]),
        small_multiples(series, title=text, unit=text, x_label=text),
        stacked_areas(series, title=text, unit=text, x_label=text),
        chart_table(series, title=text, unit=text, x_label=text),
        histogram([HistogramBin(0, 1, 1, text)], title=text, unit=text, count_unit=text),
        histogram_table([HistogramBin(0, 1, 1, text)], title=text, unit=text, count_unit=text),
        bar_chart([NamedBar(text, 1, text)], title=text, unit=text, more_href=text),
        bar_table([NamedBar(text, 1, text)], title=text, name=text, unit=text),
        value_head([NamedBar(text, 1, text)], title=text, unit=text)[0],
        heat_map([text], [text], [[1.0]], title=text, unit=text),
        heat_map_table([text], [text], [[1.0]], title=text, name=text, unit=text),
    ]
    for chart in charts:
        parsed(chart)


def test_empty_charts_are_drawn():
    for chart in (
        histogram([], title="x"),
        bar_chart([], title="x"),
        line_chart([], title="x"),
        stacked_areas([], title="x"),
    ):
        parsed(chart)
    parsed(small_multiples([], title="x"))
    parsed(heat_map([], [], [], title="x"))


def test_the_head_of_a_column_has_five_values_that_are_links():
    bars = [NamedBar(f"v{number}", 10 - number, f"?{number}", is_selected=number == 1) for number in range(7)]
    picture, num_drawn = value_head(bars, title="x")
    root = parsed(picture)
    links = [each for each in root.iter() if local_name(each) == "a"]
    assert [each.get("href") for each in links] == [f"?{number}" for number in range(5)]
    assert (num_drawn, links[4].get("aria-label")) == (5, "v4: 6 samples")
    lengths = [float(each.get("width")) for each in with_class(root, "bar")]
    assert lengths == pytest.approx([lengths[0] * count / 10 for count in (10, 9, 8, 7, 6)], abs=0.01)
    assert [len(with_class(each, "c1")) for each in links] == [0, 1, 0, 0, 0]
    assert value_head([], title="x")[1] == 0


@given(st.lists(numbers, min_size=1, max_size=6), st.sampled_from(["", "bytes", "bytes/s", "%"]))
def test_the_labels_of_the_axis_have_room(ys, unit):
    series = [ChartSeries("a", list(range(len(ys))), ys)]
    root = parsed(line_chart(series, title="x" * 300, unit=unit, width=320))
    for text in (each for each in root.iter() if local_name(each) == "text"):
        width, x = text_width(text.text, is_bold=text.get("font-weight") == "bold"), float(text.get("x"))
        left = x - {"end": width, "middle": width / 2}.get(text.get("text-anchor"), 0)
        assert left >= -0.1
        assert left + width <= 320.1


def test_long_labels_of_the_axis_are_whole():
    root = parsed(line_chart([ChartSeries("a", [0, 1], [0, 3e7])], title="x", width=440))
    assert "10,000,000 20,000,000 30,000,000" in text_of(root)


@given(texts, st.floats(1, 500))
def test_a_text_is_shortened_to_its_width(text, width):
    shown = shorten_to_width(text, width)
    assert len(shown) <= 1 or text_width(shown) <= width


def test_values_above_a_limit_are_drawn_at_the_upper_edge_and_told_on_hover():
    lines = [ChartSeries("trained", [0, 1], [50.0, 100.0]), ChartSeries("fed", [0, 1], [80.0, 1e9])]
    root = parsed(line_chart(lines, title="x", from_zero=True, y_limit=200))
    heights = [float(each.get("cy")) for each in root.iter() if local_name(each) == "circle"]
    assert heights[3] < heights[1] < heights[0]
    assert (heights[0] - heights[1]) / (heights[0] - heights[3]) == pytest.approx(1 / 3)
    assert "fed: 1,000,000,000" in text_of(with_class(root, "hover")[1])


def test_charts_on_their_own_have_the_same_scales_and_no_legend():
    series = [ChartSeries("a", [0, 1], [1, 2]), ChartSeries("b", [0, 5], [1, 200])]
    first, second = (parsed(chart) for chart in separate_charts(series, x_text=lambda x: f"t{x:g}"))
    labels = [[each.text for each in root.iter() if local_name(each) == "text"][1:] for root in (first, second)]
    assert labels[0] == labels[1]
    assert "t5" in labels[0]
    assert not with_class(first, "key")


def test_minor_marks_are_short_and_a_chart_without_values_says_so():
    marks = [ChartMark(0.5, "checkpoint", is_minor=True), ChartMark(0.5, "stall", True)]
    root = parsed(line_chart([ChartSeries("a", [0, 1], [1, 2])], title="x", marks=marks))
    heights = [float(each.get("y2")) - float(each.get("y1")) for each in with_class(root, "mark") if each.get("y2")]
    assert heights[0] < heights[1] / 5
    assert "no values" in text_of(parsed(line_chart([ChartSeries("a", [0, 1], [None, None])], title="x")))


def test_a_heat_map_has_its_scale_and_numbers():
    values = [[1e-5, 0.25], [None, 1.0]]
    text = text_of(parsed(heat_map(["a", "b"], ["w", "b"], values, title="x", log_scale=True, with_numbers=True)))
    assert "1e-05 1, log scale" in text
    assert "0.25" in text.split("log scale")[1]
    root = parsed(heat_map(["a", "b"], ["w", "b"], values, title="x", with_numbers=True, cell_width=80))
    # The number of the largest value can be read on its colour.
    assert max(float(each.get("fill-opacity")) for each in with_class(root, "cell")) == pytest.approx(0.6)
