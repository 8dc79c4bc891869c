// A page that is opened from a folder (file://) may not read other pages, so its search lists titles without excerpts.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

// On a phone the list of a page's sections covers the page. Close the list when the reader chooses a section.
document.addEventListener("click", (event) => {
  const drawer = document.getElementById("__toc");
  if (drawer && event.target.closest(".toc-drawer a")) drawer.checked = false;
});

// Let keys scroll every box that is wider than its column. If the box has a picture, a line above it says so.
function letKeysScroll() {
  for (const box of document.querySelectorAll("pre, .table-wrapper, div.cell_output")) {
    const wide = box.scrollWidth > box.clientWidth;
    if (wide) box.tabIndex = 0;
    box.classList.toggle("goes-on", wide && Boolean(box.querySelector("img")));
  }
}
letKeysScroll();
addEventListener("resize", letKeysScroll);
addEventListener("load", letKeysScroll); // pictures have no width before they are loaded
addEventListener("toggle", letKeysScroll, true); // nothing in a closed <details> has a width
