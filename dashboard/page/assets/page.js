// Tables follow the colour scheme of the page.
new MutationObserver(() => {
  document.documentElement.dataset.agThemeMode = document.documentElement.dataset.mantineColorScheme;
}).observe(document.documentElement, { attributeFilter: ["data-mantine-color-scheme"] });

// The inputs behind upload buttons have the names of these.
new MutationObserver(() => {
  for (const input of document.querySelectorAll("input[type=file]:not([aria-label])"))
    input.setAttribute("aria-label", input.parentElement?.innerText.trim() || "file");
}).observe(document, { subtree: true, childList: true });
