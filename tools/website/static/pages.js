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

// A card has a link of its own. The address is that of the part of the page that holds the card.
for (const title of document.querySelectorAll('[id^="errata-"] > section > section > h3, dl[id^="mistake-"] > dt')) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy-link";
  button.textContent = "Copy link";
  button.addEventListener("click", async () => {
    location.hash = title.parentElement.id;
    const done = await navigator.clipboard?.writeText(location.href).then(() => true, () => false);
    button.textContent = done ? "Copied" : "Copy the address above";
    setTimeout(() => (button.textContent = "Copy link"), 2000);
  });
  if (title.matches("dt")) title.append(button);
  else title.before(button);
}
