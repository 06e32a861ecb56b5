// Live parts of a page: loaded again when the server reports a change. Without this file, reload the page.
"use strict";

(() => {
  const root = document.querySelector("[data-events]");
  if (!root) return;
  let busy = false;
  let again = false;

  // Keep what the reader has opened and where the keyboard is.
  function replace(old, fresh) {
    if (old.innerHTML === fresh.innerHTML) return;
    const open = [...old.querySelectorAll("details")].map((details) => details.open);
    const focused = old.contains(document.activeElement) ? document.activeElement : null;
    const typed = focused && focused.matches("input, select, textarea");
    const name = focused && (focused.id || focused.getAttribute("href"));
    // A form that is being filled in is not replaced under the reader's hands.
    if (typed) return;
    old.replaceChildren(...document.importNode(fresh, true).childNodes);
    old.dispatchEvent(new CustomEvent("datasvc:replaced", { bubbles: true }));
    [...old.querySelectorAll("details")].forEach((details, number) => { details.open = Boolean(open[number]); });
    if (name) {
      const next = [...old.querySelectorAll("a, [id]")].find((each) => each.id === name || each.getAttribute("href") === name);
      if (next) next.focus({ preventScroll: true });
    }
  }

  async function refresh() {
    if (busy) { again = true; return; }
    busy = true;
    try {
      const response = await fetch(window.location.href, { headers: { Accept: "text/html" } });
      if (response.ok) {
        const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
        for (const part of fresh.querySelectorAll("[data-live]")) {
          const old = document.getElementById(part.id);
          // A part that was not there before, such as the first chart: the page has another shape.
          if (!old) { window.location.reload(); return; }
          if (part.dataset.series) old.dispatchEvent(new CustomEvent("datasvc:series", { detail: part.dataset.series }));
          else replace(old, part);
        }
      }
    } catch {
      // The server has stopped: the page keeps its last values, and says so.
    }
    busy = false;
    if (again) { again = false; refresh(); }
  }

  const note = document.createElement("p");
  note.className = "live";
  note.setAttribute("role", "status");
  root.before(note);

  const events = new EventSource(root.dataset.events);
  events.onopen = () => { note.textContent = "live"; };
  events.onmessage = refresh;
  events.addEventListener("end", () => { note.textContent = "ended"; events.close(); refresh(); });
  events.onerror = () => { note.textContent = "The server of this page does not respond; these are its last values."; };
  window.addEventListener("pagehide", () => events.close());
})();
