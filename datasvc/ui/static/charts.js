// Stacked areas: their legend hides and shows parts, and a cursor, which the curves share, gives the values at a step.
// Without this file the values are shown on hover and in the table.
"use strict";

(() => {
  // Kept while a live page replaces its drawings.
  const hidden = new Set();
  const followers = new Map(); // by frame: shows the cursor of others
  let shared = null; // x of the cursor

  function enable(frame) {
    const svg = frame.querySelector("svg");
    const areas = [...svg.querySelectorAll(".area")];
    const keys = [...svg.querySelectorAll(".key")];
    const strips = [...svg.querySelectorAll(".hover")];
    if (!areas.length || !strips.length) return;
    frame.dataset.enabled = "";
    const names = areas.map((area) => area.querySelector("title").textContent);
    // The upper edge from left to right, then the lower one back.
    const edges = areas.map((area) => {
      const corners = area.getAttribute("points").split(" ").map((corner) => corner.split(",").map(Number));
      return { upper: corners.slice(0, corners.length / 2), lower: corners.slice(corners.length / 2).reverse() };
    });

    // The parts that are shown stand on each other; the axis keeps its range.
    function stack() {
      let level = edges[0].lower.map(([, y]) => y);
      areas.forEach((area, number) => {
        const isHidden = hidden.has(names[number]);
        area.setAttribute("visibility", isHidden ? "hidden" : "visible");
        keys[number].setAttribute("aria-pressed", String(!isHidden));
        keys[number].querySelector("text").setAttribute("text-decoration", isHidden ? "line-through" : "none");
        if (isHidden) return;
        const { upper, lower } = edges[number];
        const next = level.map((y, at) => y - (lower[at][1] - upper[at][1]));
        const points = [...upper.map(([x], at) => [x, next[at]]), ...lower.map(([x], at) => [x, level[at]]).reverse()];
        area.setAttribute("points", points.map((point) => point.join(",")).join(" "));
        level = next;
      });
      show(shared, false);
    }

    svg.setAttribute("role", "group"); // a reader skips the buttons of an image
    keys.forEach((key, number) => {
      const toggle = () => {
        if (!hidden.delete(names[number])) hidden.add(names[number]);
        stack();
      };
      key.id = `${frame.id}-part-${number}`;
      key.setAttribute("role", "button");
      key.setAttribute("tabindex", "0");
      key.setAttribute("aria-label", `show ${names[number]}`);
      key.addEventListener("click", toggle);
      key.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        toggle();
      });
    });

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
      shared = x;
      line.setAttribute("visibility", x === null ? "hidden" : "visible");
      if (isOwn) document.dispatchEvent(new CustomEvent("datasvc:cursor", { detail: { x, from: frame.id } }));
      if (x === null) { text.textContent = ""; return null; }
      const strip = nearest(x);
      const [top, height] = ["y", "height"].map((name) => Number(strip.getAttribute(name)));
      const at = strip.dataset.at;
      for (const [name, value] of [["x1", at], ["x2", at], ["y1", top], ["y2", top + height]]) line.setAttribute(name, value);
      const values = strip.querySelector("title").textContent.split("; ");
      const isShown = (value) => ![...hidden].some((name) => value.startsWith(`${name}: `));
      text.textContent = values.filter(isShown).join("; ");
      return strip;
    }

    strips.forEach((strip) => strip.addEventListener("pointerenter", () => show(xOf(strip), true)));
    svg.addEventListener("pointerleave", () => show(null, true));
    frame.addEventListener("keydown", (event) => {
      if (event.target !== frame) return;
      const last = strips.length - 1;
      const at = shared === null ? -1 : strips.indexOf(nearest(shared));
      const next = { ArrowLeft: at < 0 ? last : at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
      if (event.key === "Escape") show(null, true);
      if (next === undefined) return;
      event.preventDefault();
      const strip = show(xOf(strips[Math.min(Math.max(next, 0), last)]), true);
      strip.scrollIntoView({ block: "nearest", inline: "nearest" });
    });
    followers.set(frame.id, (x) => show(x, false));
    stack();
  }

  document.addEventListener("datasvc:cursor", (event) => {
    followers.forEach((follow, id) => { if (id !== event.detail.from) follow(event.detail.x); });
  });
  const enableAll = () => document.querySelectorAll("[data-areas]:not([data-enabled])").forEach(enable);
  document.addEventListener("DOMContentLoaded", enableAll);
  document.addEventListener("datasvc:replaced", enableAll);
})();
