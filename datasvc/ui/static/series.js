// Replaces each drawing with `data-series` by a chart of uPlot, which can be zoomed and follows a run. If its points
// have links, a click on a point opens its page.
"use strict";

(() => {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Checkpoints and stalls are dashed lines.
  function drawMarks(plot, marks) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.setLineDash([4, 4]);
    for (const [step, , isProblem] of marks) {
      const x = plot.valToPos(step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = colour(isProblem ? "--error" : "--soft");
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  // The range of an axis: a single value is not at the edge, and rates begin at zero.
  function rangeOf(isFromZero) {
    return (plot, low, high) => {
      if (low == null) return [0, 1];
      const least = isFromZero ? Math.min(0, low) : low;
      const space = (high - least) * 0.05 || Math.abs(high) * 0.1 || 1;
      return [isFromZero && low >= 0 ? 0 : least - space, high + space];
    };
  }

  // The mark at the cursor: its text stands below the chart.
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
  const plots = [];
  let isFollowing = false;

  function shareCursor(x) {
    if (!isFollowing) document.dispatchEvent(new CustomEvent("datasvc:cursor", { detail: { x, from: "series" } }));
  }

  document.addEventListener("datasvc:cursor", (event) => {
    const { x, from } = event.detail;
    if (from === "series") return;
    isFollowing = true;
    for (const plot of plots) {
      const left = x === null ? -10 : plot.valToPos(x, "x");
      const isInside = left >= 0 && left <= plot.over.clientWidth;
      plot.setCursor(isInside ? { left, top: plot.over.clientHeight / 2 } : { left: -10, top: -10 });
    }
    isFollowing = false;
  });

  function draw(element) {
    let chart = JSON.parse(element.dataset.series);
    if (!chart.x.length) return;
    const axis = { stroke: colour("--text"), grid: { stroke: colour("--line") }, ticks: { stroke: colour("--line") } };
    const markText = document.createElement("p");
    markText.className = "mark-text";
    const options = {
      title: chart.unit ? `${chart.name}, ${chart.unit}` : chart.name,
      width: Math.max(280, Math.min(element.clientWidth, chart.width || 640)),
      height: 220,
      cursor: { sync: { key: "run" } },
      scales: { x: { time: false }, y: { range: rangeOf(chart.from_zero) } },
      axes: [{ ...axis, label: chart.axis || "step" }, { ...axis, size: 72 }],
      series: [
        { label: chart.axis || "step" },
        { label: chart.name, stroke: colour(chart.colour), width: 1.5, points: { show: chart.x.length < 60 } },
      ],
      hooks: {
        draw: [(plot) => drawMarks(plot, chart.marks)],
        setCursor: [(plot) => {
          markText.textContent = (markAt(plot, chart.marks) || [, ""])[1];
          // Only from the chart under the pointer, which has an event: the others may have no point at its step.
          if (plot.cursor.event) shareCursor(plot.cursor.idx == null ? null : chart.x[plot.cursor.idx]);
        }],
      },
    };
    element.replaceChildren();
    const plot = new uPlot(options, [chart.x, chart.y], element);
    element.append(markText);
    plots.push(plot);
    openOnClick(plot, () => (markAt(plot, chart.marks) || [])[3] || (chart.links || [])[plot.cursor.idx]);
    element.addEventListener("datasvc:series", (event) => {
      const { min, max } = plot.scales.x;
      const isZoomed = min > chart.x[0] || max < chart.x[chart.x.length - 1];
      chart = JSON.parse(event.detail);
      // A reader who has zoomed in stays there.
      plot.setData([chart.x, chart.y], !isZoomed);
      if (isZoomed) plot.redraw();
      element.dataset.points = chart.x.length;
    });
    element.dataset.points = chart.x.length;
  }

  const drawAll = () => document.querySelectorAll("[data-series]:not([data-points])").forEach(draw);
  document.addEventListener("DOMContentLoaded", drawAll);
  document.addEventListener("htmx:afterSettle", drawAll);
})();
