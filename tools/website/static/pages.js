// Opened from a folder (file://), a page may not read its neighbours: search then lists titles without excerpts.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

// On a phone the list of a page's sections lies over the page: a choice in it closes it.
document.addEventListener("click", (event) => {
  const drawer = document.getElementById("__toc");
  if (drawer && event.target.closest(".toc-drawer a")) drawer.checked = false;
});

// What is wider than its column can be scrolled with keys; of a picture this is also said.
function letKeysScroll() {
  for (const box of document.querySelectorAll("pre, .table-wrapper, div.cell_output")) {
    const wide = box.scrollWidth > box.clientWidth;
    if (wide) box.tabIndex = 0;
    box.classList.toggle("goes-on", wide && Boolean(box.querySelector("img")));
  }
}
letKeysScroll();
addEventListener("resize", letKeysScroll);
addEventListener("load", letKeysScroll); // of pictures, which have a width only then
addEventListener("toggle", letKeysScroll, true); // of <details>, in which nothing has a width before
