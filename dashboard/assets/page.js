// Tables follow the colour scheme of the page.
new MutationObserver(() => {
  document.documentElement.dataset.agThemeMode = document.documentElement.dataset.mantineColorScheme;
}).observe(document.documentElement, { attributeFilter: ["data-mantine-color-scheme"] });
