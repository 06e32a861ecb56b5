// Charts of the server: a legend that hides and shows parts, and a cursor that charts over the same values share.
// Without this file the values are shown on hover and in the table.
"use strict";

(() => {
  // Kept while a live page replaces its drawings, and in the address.
  const hidden = new Set(address.read("hide"));
  const frames = new Map(); // by id: draws a chart again, or shows the cursor of others
  const shared = new Map(); // x of the cursor by what the charts are over, such as "step"

  function toggle(name) {
    if (!hidden.delete(name)) hidden.add(name);
    address.write("hide", [...hidden]);
    frames.forEach((frame) => frame.draw()); // the same thing may be a part of several charts
  }

  // Parts that stand on each other come down where one below them is hidden; the axis keeps its range.
  function stack(areas, edges, isHidden) {
    let level = edges[0].lower.map(([, y]) => y);
    areas.forEach((area, number) => {
      if (isHidden[number]) return;
      const { upper, lower } = edges[number];
      const next = level.map((y, at) => y - (lower[at][1] - upper[at][1]));
      const points = [...upper.map(([x], at) => [x, next[at]]), ...lower.map(([x], at) => [x, level[at]]).reverse()];
      area.setAttribute("points", points.map((point) => point.join(",")).join(" "));
      level = next;
    });
  }

  // The upper edge of an area from left to right, then the lower one back.
  function edgesOf(area) {
    const corners = area.getAttribute("points").split(" ").map((corner) => corner.split(",").map(Number));
    return { upper: corners.slice(0, corners.length / 2), lower: corners.slice(corners.length / 2).reverse() };
  }

  function enableKey(key, id, name) {
    key.id = id;
    key.setAttribute("role", "button");
    key.setAttribute("tabindex", "0");
    key.setAttribute("aria-label", `show ${name}`);
    key.addEventListener("click", () => toggle(name));
    key.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      toggle(name);
    });
  }

  function enable(frame) {
    const svg = frame.querySelector("svg");
    const parts = [...svg.querySelectorAll(".part")];
    const keys = [...svg.querySelectorAll(".key")];
    const strips = [...svg.querySelectorAll(".hover")];
    if (!parts.length) return;
    frame.dataset.enabled = "";
    const over = frame.dataset.chart;
    const names = parts.map((part) => part.querySelector("title").textContent);
    const edges = parts[0].matches(".area") ? parts.map(edgesOf) : null;
    svg.setAttribute("role", "group"); // a reader skips the buttons of an image
    // A single part is not hidden: an empty chart says nothing.
    if (keys.length > 1) keys.forEach((key, number) => enableKey(key, `${frame.id}-part-${number}`, names[number]));

    function draw() {
      if (keys.length > 1) {
        const isHidden = names.map((name) => hidden.has(name));
        parts.forEach((part, number) => {
          part.setAttribute("visibility", isHidden[number] ? "hidden" : "visible");
          keys[number].setAttribute("aria-pressed", String(!isHidden[number]));
          keys[number].querySelector("text").setAttribute("text-decoration", isHidden[number] ? "line-through" : "none");
        });
        if (edges) stack(parts, edges, isHidden);
      }
      show(shared.get(over) ?? null, false);
    }

    const line = document.createElementNS(svg.namespaceURI, "line");
    line.setAttribute("class", "cursor line ink");
    line.setAttribute("pointer-events", "none");
    svg.append(line);
    const text = document.createElement("p");
    text.className = "mark-text";
    text.setAttribute("role", "status");
    frame.after(text);

    const xOf = (strip) => Number(strip.dataset.x);
    const nearest = (x) => strips.reduce((best, strip) => (Math.abs(xOf(strip) - x) < Math.abs(xOf(best) - x) ? strip : best));

    // `x`: where the cursor is; null: nowhere.
    function show(x, isOwn) {
      if (!strips.length) return null;
      shared.set(over, x);
      line.setAttribute("visibility", x === null ? "hidden" : "visible");
      if (isOwn) document.dispatchEvent(new CustomEvent("datasvc:cursor", { detail: { x, over, from: frame.id } }));
      if (x === null) { text.textContent = ""; return null; }
      const strip = nearest(x);
      const [top, height] = ["y", "height"].map((name) => Number(strip.getAttribute(name)));
      const at = strip.dataset.at;
      for (const [name, value] of [["x1", at], ["x2", at], ["y1", top], ["y2", top + height]]) line.setAttribute(name, value);
      const values = strip.querySelector("title").textContent.split("; ");
      const isShown = (value) => keys.length < 2 || ![...hidden].some((name) => value.startsWith(`${name}: `));
      text.textContent = values.filter(isShown).join("; ");
      return strip;
    }

    strips.forEach((strip) => strip.addEventListener("pointerenter", () => show(xOf(strip), true)));
    svg.addEventListener("pointerleave", () => show(null, true));
    frame.addEventListener("keydown", (event) => {
      if (event.target !== frame || !strips.length) return;
      const last = strips.length - 1;
      const x = shared.get(over) ?? null;
      const at = x === null ? -1 : strips.indexOf(nearest(x));
      const next = { ArrowLeft: at < 0 ? last : at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
      if (event.key === "Escape") show(null, true);
      if (next === undefined) return;
      event.preventDefault();
      const strip = show(xOf(strips[Math.min(Math.max(next, 0), last)]), true);
      strip.scrollIntoView({ block: "nearest", inline: "nearest" });
    });
    frames.set(frame.id, { draw, follow: (x) => show(x, false), over });
    draw();
  }

  document.addEventListener("datasvc:cursor", (event) => {
    const { x, over, from } = event.detail;
    frames.forEach((frame, id) => { if (id !== from && frame.over === over) frame.follow(x); });
  });

  function enableAll() {
    frames.forEach((_, id) => { if (!document.getElementById(id)) frames.delete(id); });
    document.querySelectorAll("[data-chart]:not([data-enabled])").forEach(enable);
  }

  document.addEventListener("DOMContentLoaded", enableAll);
  document.addEventListener("datasvc:replaced", enableAll);
  document.addEventListener("htmx:afterSettle", enableAll);
  // A form has put its own address into the history.
  ["htmx:pushedIntoHistory", "htmx:replacedInHistory"].forEach((name) => document.addEventListener(name, () => address.write("hide", [...hidden])));
})();
