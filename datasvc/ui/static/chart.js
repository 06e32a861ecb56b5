// Replaces the drawn chart in each element with `data-chart` by one that can be zoomed: drag to zoom, double-click to
// go back, click a point to open its page. Every page works without this file.
"use strict";

(() => {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function draw(element) {
    const chart = JSON.parse(element.dataset.chart);
    if (!chart.x.length) return;
    const axis = { stroke: colour("--text"), grid: { stroke: colour("--line") }, ticks: { stroke: colour("--line") } };
    const options = {
      width: Math.max(280, Math.min(element.clientWidth, 960)),
      height: 260,
      scales: { x: { time: false } },
      axes: [{ ...axis, label: chart.axis }, { ...axis, size: 72, label: chart.name }],
      series: [
        { label: chart.axis },
        { label: chart.name, stroke: colour("--c0"), width: 1.5, spanGaps: true, points: { show: chart.x.length < 200 } },
      ],
    };
    element.replaceChildren();
    const plot = new uPlot(options, [chart.x, chart.y], element);
    let pressed = 0;
    plot.over.addEventListener("pointerdown", (event) => { pressed = event.clientX; });
    plot.over.addEventListener("click", (event) => {
      const index = plot.cursor.idx;
      // A drag zooms and is no click.
      if (Math.abs(event.clientX - pressed) < 4 && index != null && chart.links[index]) location.assign(chart.links[index]);
    });
    element.dataset.drawn = "uplot";
  }

  const drawAll = () => document.querySelectorAll("[data-chart]:not([data-drawn])").forEach(draw);
  document.addEventListener("DOMContentLoaded", drawAll);
  document.addEventListener("htmx:afterSettle", drawAll);
})();
