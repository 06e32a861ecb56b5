// Zoom and pan of a drawing: drag to pan, buttons or Ctrl and the wheel to zoom. Every page works without this file.
"use strict";

(() => {
  const MAX_ZOOM = 16;

  // What is shown is in the address: x, y and width of the view, by the name of the drawing in `data-zoom`.
  function enable(frame) {
    const svg = frame.querySelector("svg");
    const region = frame.querySelector(".scroll");
    if (!svg || !region) return;
    const [left, top, fullWidth, fullHeight] = svg.getAttribute("viewBox").split(" ").map(Number);
    const whole = { x: left, y: top, width: fullWidth, height: fullHeight };
    let view = { ...whole };

    function show() {
      svg.setAttribute("viewBox", `${view.x} ${view.y} ${view.width} ${view.height}`);
      const isWhole = view.x === whole.x && view.y === whole.y && view.width === whole.width;
      address.write(frame.dataset.zoom, isWhole ? [] : [[view.x, view.y, view.width].map(Math.round).join(",")]);
    }
    function zoom(factor, x = view.x + view.width / 2, y = view.y + view.height / 2) {
      const width = Math.min(Math.max(view.width / factor, whole.width / MAX_ZOOM), whole.width * 2);
      const scale = width / view.width;
      view = { x: x - (x - view.x) * scale, y: y - (y - view.y) * scale, width, height: view.height * scale };
      show();
    }
    function pointOf(event) {
      const box = svg.getBoundingClientRect();
      return [view.x + ((event.clientX - box.x) / box.width) * view.width, view.y + ((event.clientY - box.y) / box.height) * view.height];
    }

    const [x, y, width] = (address.read(frame.dataset.zoom)[0] || "").split(",").map(Number);
    if (width >= whole.width / MAX_ZOOM && width <= whole.width * 2 && Number.isFinite(x) && Number.isFinite(y)) {
      view = { x, y, width, height: (whole.height * width) / whole.width };
      show();
    }

    const bar = document.createElement("div");
    bar.className = "zoom";
    const actions = [["+", "Zoom in", () => zoom(1.5)], ["−", "Zoom out", () => zoom(1 / 1.5)], ["⟲", "Whole picture", () => { view = { ...whole }; show(); }]];
    for (const [text, label, act] of actions) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      button.setAttribute("aria-label", label);
      button.addEventListener("click", act);
      bar.append(button);
    }
    frame.prepend(bar);

    svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return; // the wheel alone scrolls the page
      event.preventDefault();
      zoom(event.deltaY < 0 ? 1.2 : 1 / 1.2, ...pointOf(event));
    }, { passive: false });

    let start = null;
    let moved = false;
    svg.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      start = { x: event.clientX, y: event.clientY, view: { ...view } };
      moved = false;
    });
    window.addEventListener("pointermove", (event) => {
      if (!start) return;
      const box = svg.getBoundingClientRect();
      const [dx, dy] = [event.clientX - start.x, event.clientY - start.y];
      moved = moved || Math.abs(dx) + Math.abs(dy) > 4;
      if (!moved) return;
      view = { ...view, x: start.view.x - (dx / box.width) * view.width, y: start.view.y - (dy / box.height) * view.height };
      svg.setAttribute("viewBox", `${view.x} ${view.y} ${view.width} ${view.height}`);
    });
    window.addEventListener("pointerup", () => { if (start && moved) show(); start = null; });
    // A drag that ends on a link does not open it.
    svg.addEventListener("click", (event) => { if (moved) { event.preventDefault(); moved = false; } }, true);
    svg.addEventListener("dragstart", (event) => event.preventDefault());
  }

  document.addEventListener("DOMContentLoaded", () => document.querySelectorAll("[data-zoom]").forEach(enable));
})();
