// The number beside each slider follows it. Without this file, the numbers are those of the last "Plan".
"use strict";

document.addEventListener("input", (event) => {
  if (event.target.type !== "range") return;
  const output = document.querySelector(`output[for="${CSS.escape(event.target.id)}"]`);
  if (output) output.value = event.target.value;
});
