// Replaces each drawing with `data-series` by a chart of uPlot, which can be zoomed and follows a run. If its points
// have links, a click on a point opens its page.
"use strict";

(() => {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const MAX_WIDTH = 560;
  const MINOR_MARK = 10;
  const AXIS = /^(-?[\d.e+-]+)\.\.(-?[\d.e+-]+)$/;

  // Stalls are dashed lines; checkpoints are short lines on the axis, because there may be very many.
  function drawMarks(plot, marks) {
    const { ctx, bbox } = plot;
    ctx.save();
    for (const [step, , isProblem, , isMinor] of marks) {
      const x = plot.valToPos(step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.setLineDash(isMinor ? [] : [4, 4]);
      ctx.strokeStyle = colour(isProblem ? "--error" : "--soft");
      ctx.beginPath();
      ctx.moveTo(x, isMinor ? bbox.top + bbox.height - MINOR_MARK * devicePixelRatio : bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  // The range of an axis: a single value is not at the edge, rates begin at zero, and shares end at one.
  function rangeOf(isFromZero) {
    return (plot, low, high) => {
      if (low == null) return [0, 1];
      const least = isFromZero ? Math.min(0, low) : low;
      const space = (high - least) * 0.05 || Math.abs(high) * 0.1 || 1;
      const isShare = low >= 0 && high <= 1 && high > 0.5;
      const bottom = low >= 0 && (isFromZero || least - space < 0) ? 0 : least - space;
      return [bottom, isShare ? Math.min(1, high + space) : high + space];
    };
  }

  const textOf = (value) => (value == null ? "no value" : Number(value.toPrecision(4)).toLocaleString("en"));

  // A value with its unit, in the words of the charts of the server: "1.5 GB".
  function quantityOf(value, unit) {
    const [name, size] = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]].find(([, least]) => value >= least) || [];
    return unit === "bytes" && name ? `${textOf(value / size)} ${name}` : `${textOf(value)} ${unit || ""}`.trim();
  }

  // The mark at the cursor.
  function markAt(plot, marks) {
    const left = plot.cursor.left;
    if (left == null || left < 0) return undefined;
    const distance = (mark) => Math.abs(plot.valToPos(mark[0], "x") - left);
    const nearest = marks.reduce((best, mark) => (!best || distance(mark) < distance(best) ? mark : best), undefined);
    return nearest && distance(nearest) <= 6 ? nearest : undefined;
  }

  function openOnClick(plot, linkAt) {
    let pressed = 0;
    plot.over.addEventListener("pointerdown", (event) => { pressed = event.clientX; });
    plot.over.addEventListener("click", (event) => {
      // A drag zooms and is no click.
      const link = Math.abs(event.clientX - pressed) < 4 ? linkAt() : undefined;
      if (link) location.assign(link);
    });
  }

  // The drawings of the server follow the cursor of the charts, and the charts that of the drawings.
  const plots = new Set();
  let isFollowing = false;

  function shareCursor(x, over) {
    if (!isFollowing) document.dispatchEvent(new CustomEvent("datasvc:cursor", { detail: { x, over, from: "series" } }));
  }

  document.addEventListener("datasvc:cursor", (event) => {
    const { x, over, from } = event.detail;
    if (from === "series") return;
    isFollowing = true;
    for (const { plot } of [...plots].filter((each) => each.over === over)) {
      const left = x === null ? -10 : plot.valToPos(x, "x");
      const isInside = left >= 0 && left <= plot.over.clientWidth;
      plot.setCursor(isInside ? { left, top: plot.over.clientHeight / 2 } : { left: -10, top: -10 });
    }
    isFollowing = false;
  });

  // The range that is zoomed, as `x=10..40` in the address, is that of all charts of a page; null: all values.
  let zoomed = (([text]) => {
    const found = AXIS.exec(text || "");
    const ends = found && [Number(found[1]), Number(found[2])];
    return ends && ends[0] < ends[1] ? ends : null;
  })(address.read("x"));
  let isZooming = false;

  function zoomAll(range) {
    zoomed = range;
    address.write("x", range ? [range.map((end) => Number(end.toPrecision(6))).join("..")] : []);
    isZooming = true;
    for (const { plot, ends } of plots) {
      const [min, max] = range || ends();
      plot.setScale("x", { min, max });
    }
    isZooming = false;
  }

  function draw(element) {
    let chart = JSON.parse(element.dataset.series);
    if (!chart.x.length) return;
    const grid = { stroke: () => colour("--line"), width: 1 };
    const axis = { stroke: () => colour("--text"), grid, ticks: grid };
    const over = chart.axis || "step";
    const text = document.createElement("p");
    text.className = "mark-text";
    const byteTicks = chart.unit === "bytes" ? { values: (plot, ticks) => ticks.map((tick) => quantityOf(tick, "bytes")) } : {};
    const widthOf = () => Math.max(280, Math.min(element.clientWidth, MAX_WIDTH));
    // One value has an axis too: it begins and ends beside it.
    const ends = () => {
      const [first, last] = [chart.x[0], chart.x[chart.x.length - 1]];
      return first < last ? [first, last] : [first - 1, last + 1];
    };
    const describe = (plot) => {
      const [at, mark] = [plot.cursor.idx, markAt(plot, chart.marks)];
      const values = at == null ? [] : [`${over} ${textOf(chart.x[at])}`, `${chart.name}: ${quantityOf(chart.y[at], chart.unit)}`];
      return [...values, ...(mark ? [mark[1]] : [])].join("; ");
    };
    const options = {
      title: chart.unit ? `${chart.name}, ${chart.unit}` : chart.name,
      width: widthOf(),
      height: 220,
      cursor: { sync: { key: over, setSeries: false } },
      legend: { show: false },
      scales: { x: { time: false, range: (plot, min, max) => (min < max ? [min, max] : ends()) }, y: { range: rangeOf(chart.from_zero) } },
      axes: [
        { ...axis, label: over, labelSize: 20, size: 36 },
        { ...axis, ...byteTicks, size: (plot, values) => Math.max(40, 16 + 7.5 * Math.max(0, ...(values || []).map((value) => value.length))) },
      ],
      series: [
        { label: over },
        { label: chart.name, stroke: () => colour(chart.colour), width: 1.5, points: { show: chart.x.length < 60 } },
      ],
      hooks: {
        draw: [(plot) => drawMarks(plot, chart.marks)],
        setCursor: [(plot) => {
          text.textContent = describe(plot);
          // Only from the chart under the pointer, which has an event: the others may have no point at its step.
          if (plot.cursor.event) shareCursor(plot.cursor.idx == null ? null : chart.x[plot.cursor.idx], over);
        }],
        setScale: [(plot, key) => {
          if (key !== "x" || isZooming || !element.dataset.points) return;
          const { min, max } = plot.scales.x;
          const [first, last] = ends();
          zoomAll(min > first || max < last ? [min, max] : null);
        }],
      },
    };
    element.replaceChildren();
    const plot = new uPlot(options, [chart.x, chart.y], element);
    element.append(text);
    const entry = { plot, ends, over };
    plots.add(entry);
    isZooming = true;
    if (zoomed) plot.setScale("x", { min: zoomed[0], max: zoomed[1] });
    isZooming = false;
    openOnClick(plot, () => (markAt(plot, chart.marks) || [])[3] || (chart.links || [])[plot.cursor.idx]);
    element.addEventListener("datasvc:series", (event) => {
      chart = JSON.parse(event.detail);
      isZooming = true;
      plot.setData([chart.x, chart.y], false);
      // A reader who has zoomed in stays there.
      const [min, max] = zoomed || ends();
      plot.setScale("x", { min, max });
      isZooming = false;
      element.dataset.points = chart.x.length;
    });
    new ResizeObserver(() => { if (plot.width !== widthOf()) plot.setSize({ width: widthOf(), height: 220 }); }).observe(element);
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot.redraw());
    element.dataset.points = chart.x.length;
  }

  function drawAll() {
    plots.forEach((entry) => { if (!entry.plot.root.isConnected) { entry.plot.destroy(); plots.delete(entry); } });
    document.querySelectorAll("[data-series]:not([data-points])").forEach(draw);
  }

  document.addEventListener("DOMContentLoaded", drawAll);
  document.addEventListener("htmx:afterSettle", drawAll);
})();
