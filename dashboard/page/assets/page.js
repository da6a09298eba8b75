// Tables follow the colour scheme of the page.
new MutationObserver(() => {
  document.documentElement.dataset.agThemeMode = document.documentElement.dataset.mantineColorScheme;
}).observe(document.documentElement, { attributeFilter: ["data-mantine-color-scheme"] });

// The inputs behind upload buttons have the names of these.
new MutationObserver(() => {
  for (const input of document.querySelectorAll("input[type=file]:not([aria-label])"))
    input.setAttribute("aria-label", input.parentElement?.innerText.trim() || "file");
}).observe(document, { subtree: true, childList: true });

// What a word or a knob means: shown beside what is pointed at for a while, or has the focus, until Escape.
(() => {
  const tip = Object.assign(document.createElement("div"), { id: "tip", className: "tip", hidden: true });
  tip.setAttribute("role", "tooltip");
  let owner = null, described = null, waiting = 0;
  function hide() {
    clearTimeout(waiting);
    described?.removeAttribute("aria-describedby");
    owner = described = null;
    tip.hidden = true;
  }
  function soon(target, focused) {
    const host = target instanceof Element ? target.closest("[data-tip]") : null;
    if (host && host === owner) return;
    hide();
    if (!host) return;
    owner = host;
    waiting = setTimeout(() => {
      if (!host.isConnected) return;
      if (!tip.isConnected) document.body.append(tip);
      tip.textContent = host.dataset.tip;
      tip.hidden = false;
      described = focused;
      described?.setAttribute("aria-describedby", "tip");
      const box = host.getBoundingClientRect(), right = box.right + 8 + tip.offsetWidth < innerWidth;
      tip.style.left = `${right ? box.right + 8 : Math.max(8, innerWidth - tip.offsetWidth - 8)}px`;
      const below = right ? box.top : box.bottom + 8;
      tip.style.top = `${Math.max(8, Math.min(below, innerHeight - tip.offsetHeight - 8))}px`;
    }, 600);
  }
  addEventListener("pointerover", (e) => soon(e.target, null));
  addEventListener("focusin", (e) => soon(e.target, e.target));
  addEventListener("focusout", hide);
  addEventListener("pointerdown", hide, true);
  addEventListener("scroll", () => { if (!tip.hidden) hide(); }, true);
  addEventListener("keydown", (e) => { if (e.key === "Escape") hide(); });
})();
