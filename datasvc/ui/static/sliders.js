// The number beside each slider follows it at once, and the curves follow while it is dragged. Without this file, both
// are those of the last "Plan".
"use strict";

(() => {
  const PAUSE_MS = 150;
  let timer = 0;
  let drag = null; // from the first movement until its last value is shown

  document.addEventListener("input", (event) => {
    const slider = event.target;
    if (slider.type !== "range") return;
    const output = document.querySelector(`output[for="${CSS.escape(slider.id)}"]`);
    if (output) output.value = slider.value;
    drag = drag || { isPushed: false, isEnded: false };
    clearTimeout(timer);
    timer = setTimeout(() => slider.form.dispatchEvent(new Event("dragged")), PAUSE_MS);
  });
  document.addEventListener("change", (event) => {
    if (event.target.type !== "range") return;
    clearTimeout(timer);
    if (drag) drag.isEnded = true;
  });
  // A drag is one entry of the history, however many values it passes.
  document.addEventListener("htmx:beforeHistoryUpdate", (event) => {
    if (!drag) return;
    if (drag.isPushed) event.detail.history.type = "replace";
    drag.isPushed = true;
    if (drag.isEnded) drag = null;
  });
})();
