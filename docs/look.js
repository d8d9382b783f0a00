// The theme's buttons that copy code stand in landmarks without names.
let named = 0;
new MutationObserver(() => {
  for (const nav of document.querySelectorAll(".md-code__nav:not([aria-label])")) {
    nav.setAttribute("aria-label", `Code ${(named += 1)}`);
  }
}).observe(document.body, { childList: true, subtree: true });
