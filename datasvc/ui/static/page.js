// Keys, and copying. Every page works without this file.
"use strict";

(() => {
  document.documentElement.classList.add("script");

  const rows = () => [...document.querySelectorAll("table.rows tbody tr")];
  let marked = -1;

  function mark(step) {
    const all = rows();
    if (!all.length) return;
    if (marked >= 0 && all[marked]) all[marked].classList.remove("marked");
    marked = Math.min(Math.max(marked + step, 0), all.length - 1);
    all[marked].classList.add("marked");
    all[marked].scrollIntoView({ block: "nearest" });
    const link = all[marked].querySelector("a");
    if (link) link.focus({ preventScroll: true });
  }

  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, textarea, select");
    const keys = document.getElementById("keys");
    if (event.key === "Escape") {
      if (keys) keys.hidden = true;
      if (typing) event.target.blur();
      return;
    }
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/") {
      event.preventDefault();
      document.getElementById("search").focus();
    } else if (event.key === "j") mark(1);
    else if (event.key === "k") mark(-1);
    else if (event.key === "?" && keys) keys.hidden = !keys.hidden;
  });

  // A click on a digest or a command copies all of it.
  document.addEventListener("click", async (event) => {
    const element = event.target.closest("[data-copy]");
    if (!element || !navigator.clipboard) return;
    try {
      await navigator.clipboard.writeText(element.dataset.copy);
      element.classList.add("copied");
      setTimeout(() => element.classList.remove("copied"), 1200);
    } catch {
      // A browser may refuse the clipboard; the text can still be selected.
    }
  });

  // The navigation folds on narrow screens.
  const navigation = document.querySelector(".frame > nav > details");
  if (navigation && window.matchMedia("(max-width: 700px)").matches) navigation.open = false;
})();
