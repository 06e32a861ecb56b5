// Live parts of a page: those that have changed are loaded after each event of the server. Without this file, reload
// the page.
"use strict";

(() => {
  const root = document.querySelector("[data-events]");
  if (!root) return;
  const retryAfter = 5000;
  const digests = new Map(); // of the parts that this page has, by id
  let busy = false;
  let again = false;
  let shape; // of the page: with another one, it is loaded as a whole
  let refreshed = Date.now();
  let failure = ""; // why the values are old
  let timer;

  const note = document.createElement("p");
  note.className = "live";
  const state = document.createElement("span");
  state.setAttribute("role", "status");
  const age = document.createElement("span"); // not a part of the status: a screen reader would read it again and again
  note.append(state, " ", age);
  root.before(note);

  function show(text) {
    if (state.textContent !== text) state.textContent = text;
    age.textContent = failure ? `These values are ${Math.round((Date.now() - refreshed) / 1000)} s old.` : "";
  }

  function fail(reason) {
    failure = reason;
    show(failure);
  }

  // Keep what the reader has opened and where the keyboard is.
  function replace(old, html) {
    const open = [...old.querySelectorAll("details")].map((details) => details.open);
    const focused = old.contains(document.activeElement) ? document.activeElement : null;
    const typed = focused && focused.matches("input, select, textarea");
    const name = focused && (focused.id || focused.getAttribute("href"));
    // A form that is being filled in is not replaced under the reader's hands.
    if (typed) return false;
    const fresh = new DOMParser().parseFromString(html, "text/html").body;
    if (old.innerHTML === fresh.innerHTML) return true;
    old.replaceChildren(...document.importNode(fresh, true).childNodes);
    old.dispatchEvent(new CustomEvent("datasvc:replaced", { bubbles: true }));
    [...old.querySelectorAll("details")].forEach((details, number) => { details.open = Boolean(open[number]); });
    if (name) {
      const next = [...old.querySelectorAll("a, [id]")].find((each) => each.id === name || each.getAttribute("href") === name);
      if (next) next.focus({ preventScroll: true });
    }
    return true;
  }

  // What a closed element has is loaded when it is opened.
  function wanted() {
    const parts = [...document.querySelectorAll("[data-live]")].filter((part) => !part.closest("details:not([open])"));
    return parts.map((part) => `${part.id}=${digests.get(part.id) || ""}`).join(" ");
  }

  async function refresh() {
    if (busy) { again = true; return; }
    busy = true;
    clearTimeout(timer);
    try {
      const { pathname, search } = window.location;
      const query = new URLSearchParams(search);
      // Only charts use these: without them, the server renders each state once for all readers.
      for (const name of ["x", "hide"]) query.delete(name);
      const response = await fetch(`/api/parts${pathname}?${query}`, { headers: { "Datasvc-Parts": wanted() } });
      const answer = await response.json();
      if (!response.ok) throw new Error(answer.error);
      // A part that was not there before, such as the first chart: the page has another shape.
      if (answer.ids.some((id) => !document.getElementById(id))) { window.location.reload(); return; }
      for (const [id, part] of Object.entries(answer.parts)) {
        const old = document.getElementById(id);
        if (part.series !== undefined) old.dispatchEvent(new CustomEvent("datasvc:series", { detail: part.series }));
        else if (!replace(old, part.html)) continue;
        digests.set(id, part.digest);
      }
      refreshed = Date.now();
      if (failure) { failure = ""; show(events ? "live" : "ended"); }
    } catch (error) {
      fail(`The last refresh has failed: ${error.message}`);
      if (!document.hidden) timer = setTimeout(refresh, retryAfter);
    }
    busy = false;
    if (again) { again = false; refresh(); }
  }

  let events = null;
  let isOver = false;

  function open() {
    if (events || isOver) return;
    events = new EventSource(root.dataset.events);
    events.onopen = () => { failure = ""; show("live"); };
    events.onmessage = (event) => {
      const data = JSON.parse(event.data);
      if (shape !== undefined && data.shape !== shape) { window.location.reload(); return; }
      shape = data.shape;
      refresh();
    };
    events.addEventListener("failing", (event) => fail(JSON.parse(event.data).error));
    events.addEventListener("end", () => { close(); isOver = true; show("ended"); refresh(); });
    events.onerror = () => {
      fail("The server of this page does not respond; these are its last values.");
      // After a response that is no stream, a browser does not try again by itself.
      if (events.readyState === EventSource.CLOSED) { close(); timer = setTimeout(open, retryAfter); }
    };
  }

  function close() {
    if (events) events.close();
    events = null;
    clearTimeout(timer);
  }

  // A browser has six connections to a server: hidden windows must not hold them, or a seventh would never load.
  document.addEventListener("visibilitychange", () => { if (document.hidden) close(); else open(); });
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", (event) => { if (event.persisted) open(); });
  document.addEventListener("toggle", (event) => { if (event.target.open && event.target.querySelector("[data-live]")) refresh(); }, true);
  setInterval(() => show(state.textContent), retryAfter);
  if (!document.hidden) open();
})();
