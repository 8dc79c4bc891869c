// Plays the recorded pictures of a lesson with a button and a slider, one picture at a time. Without scripts, the page shows
// all pictures, one below the other.
"use strict";

(() => {
  const EVERY = 1500; // milliseconds, as in the notebook's player

  function make(name, attributes) {
    const found = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
    return found;
  }

  for (const player of document.querySelectorAll("[data-frames]")) {
    const frames = [...player.children];
    const last = frames.length - 1;
    const button = make("button", { type: "button" });
    const slider = make("input", { type: "range", min: 0, max: last, value: 0, "aria-label": player.dataset.frames });
    const label = make("output", {});
    const words = make("p", { "aria-live": "polite" });
    const controls = make("div", { class: "player" });
    let timer = null;

    function show() {
      const number = Number(slider.value);
      frames.forEach((frame, each) => { frame.hidden = each !== number; });
      label.textContent = `${player.dataset.frames} ${frames[number].dataset.name}`;
      slider.setAttribute("aria-valuetext", label.textContent);
      words.textContent = frames[number].querySelector("p").textContent;
    }

    // A browser loads a hidden picture only when it is shown, so load all pictures once somebody plays them.
    function load() {
      for (const picture of player.querySelectorAll("img")) picture.loading = "eager";
    }

    function stop() {
      clearInterval(timer);
      timer = null;
      button.textContent = "Play";
    }

    function next() {
      slider.value = Number(slider.value) + 1;
      show();
      if (Number(slider.value) === last) stop();
    }

    button.addEventListener("click", () => {
      load();
      if (timer) return stop();
      button.textContent = "Pause";
      timer = setInterval(next, EVERY);
      if (Number(slider.value) === last) {
        slider.value = 0;
        return show();
      }
      return next();
    });
    slider.addEventListener("input", () => { load(); stop(); show(); });
    frames.forEach((frame) => { frame.querySelector("p").hidden = true; });
    controls.append(button, slider, label);
    player.prepend(controls);
    player.append(words);
    stop();
    show();
  }
})();
