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
    // The head of the table stays, above the rows that scroll.
    const hidden = all[marked].closest("table").tHead.getBoundingClientRect().bottom - all[marked].getBoundingClientRect().top;
    if (hidden > 0) (all[marked].closest(".scroll") || document.scrollingElement).scrollBy(0, -hidden);
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

  // A click on a digest or a command, or Enter where it has the focus, copies all of it.
  async function copyText(text) {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    // Browsers give the clipboard to pages of HTTPS and of this machine alone; elsewhere a selection can be copied.
    const area = document.createElement("textarea");
    const focused = document.activeElement;
    area.value = text;
    area.className = "unseen";
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    if (focused) focused.focus({ preventScroll: true });
    if (!isCopied) throw new Error("not copied");
    return undefined;
  }

  async function copy(element) {
    try {
      await copyText(element.dataset.copy);
      element.classList.add("copied");
      document.getElementById("said").textContent = "copied";
      setTimeout(() => { element.classList.remove("copied"); document.getElementById("said").textContent = ""; }, 1200);
    } catch {
      // A browser may refuse the clipboard; the text can still be selected.
    }
  }

  document.addEventListener("click", (event) => {
    const element = event.target.closest("[data-copy]");
    if (element && window.getSelection().isCollapsed) copy(element);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target.matches("[data-copy]")) copy(event.target);
  });

  // The navigation folds on narrow screens.
  const navigation = document.querySelector(".frame > nav > details");
  if (navigation && window.matchMedia("(max-width: 700px)").matches) navigation.open = false;
})();
