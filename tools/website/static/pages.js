// Opened from a folder (file://), a page may not read its neighbours: search then lists titles without excerpts.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

// On a phone the list of a page's sections lies over the page: a choice in it closes it.
document.addEventListener("click", (event) => {
  const drawer = document.getElementById("__toc");
  if (drawer && event.target.closest(".toc-drawer a")) drawer.checked = false;
});

// Code and tables that are wider than their column can be scrolled with keys.
function letKeysScroll() {
  for (const wide of document.querySelectorAll("pre, .table-wrapper")) if (wide.scrollWidth > wide.clientWidth) wide.tabIndex = 0;
}
letKeysScroll();
addEventListener("resize", letKeysScroll);
addEventListener("toggle", letKeysScroll, true); // of <details>, in which nothing has a width before
