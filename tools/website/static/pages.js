// A page that is opened from a folder (file://) may not read other pages, so its search lists titles without excerpts.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

// On a phone the list of a page's sections covers the page. Close the list when the reader chooses a section.
document.addEventListener("click", (event) => {
  const drawer = document.getElementById("__toc");
  if (drawer && event.target.closest(".toc-drawer a")) drawer.checked = false;
});

// The list of all pages shows the current one in its middle. The page itself does not move.
const list = document.querySelector(".sidebar-scroll");
const current = list?.querySelector(".current-page > a");
if (current) {
  const below = current.getBoundingClientRect().top - list.getBoundingClientRect().top;
  list.scrollBy({ top: below - list.clientHeight / 2, behavior: "instant" }); // the theme's own scrolling takes its time
}

// Let keys scroll every box that is wider than its column, and shade the edge behind which it goes on.
function letKeysScroll() {
  for (const box of document.querySelectorAll("pre, .table-wrapper, .play-table, div.cell_output")) {
    const wide = box.scrollWidth > box.clientWidth;
    if (wide) box.tabIndex = 0;
    box.classList.toggle("goes-on", wide);
  }
}
letKeysScroll();
addEventListener("resize", letKeysScroll);
addEventListener("load", letKeysScroll); // pictures have no width before they are loaded
addEventListener("toggle", letKeysScroll, true); // nothing in a closed <details> has a width

// On a phone a picture fills the column. A tap makes it twice as large, in a box that scrolls.
document.addEventListener("click", (event) => {
  const picture = event.target.closest("div.cell_output img");
  if (!picture || !matchMedia("(max-width: 46em)").matches) return;
  (picture.closest("[data-frames]") ?? picture).classList.toggle("enlarged");
  letKeysScroll();
});

// A card has a link of its own. The address is that of the part of the page that holds the card.
const LINK = '<svg viewBox="0 0 24 24" role="img" aria-label="Copy link"><path d="M10 14a4 4 0 0 0 6 0l4-4a4 4 0 0 0-6-6l-1 1M14 10a4 4 0 0 0-6 0l-4 4a4 4 0 0 0 6 6l1-1"/></svg>';
for (const title of document.querySelectorAll('[id^="errata-"] > section > section > h3, dl[id^="mistake-"] > dt')) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy-link";
  button.innerHTML = LINK;
  button.addEventListener("click", async () => {
    location.hash = title.parentElement.id;
    const done = await navigator.clipboard?.writeText(location.href).then(() => true, () => false);
    button.textContent = done ? "Copied" : "Copy the address above";
    setTimeout(() => (button.innerHTML = LINK), 2000);
  });
  if (title.matches("dt")) title.append(button);
  else title.before(button);
}
