// Draws the formulas of a page, also for screen readers, with the copy of KaTeX beside this file.
"use strict";

(() => {
  const here = new URL("katex/", document.currentScript.src);
  const style = Object.assign(document.createElement("link"), { rel: "stylesheet", href: new URL("katex.min.css", here) });
  const code = Object.assign(document.createElement("script"), { src: new URL("katex.min.js", here) });
  code.addEventListener("load", () => {
    for (const formula of document.querySelectorAll("article .math")) {
      const text = formula.textContent.trim();
      const display = !text.startsWith("\\(");
      katex.render(text.replace(/^\\[([]|\\[)\]]$/g, ""), formula, { displayMode: display, throwOnError: false });
    }
    document.documentElement.dataset.formulas = "drawn";
  });
  document.head.append(style, code);
})();
