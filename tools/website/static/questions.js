// Lets readers answer a lesson's questions on its page. Until a question is answered, the page hides the cells from the
// question to the next one. Answers stay in this browser. Without scripts, the page shows everything.
"use strict";

(() => {
  const SHOWN = "ringlab: answers shown";
  const store = {
    get: (key) => { try { return localStorage.getItem(key); } catch { return null; } },
    set: (key, value) => { try { localStorage.setItem(key, value); } catch { /* without storage, the page asks again next time */ } },
  };
  const boxes = [...document.querySelectorAll("[data-question]")];
  if (!boxes.length) return;

  function make(name, attributes, ...children) {
    const found = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
    found.append(...children);
    return found;
  }

  const HEADING = "h1, h2, h3, h4, h5, h6";
  const blocks = [...document.querySelectorAll("article section > :not(section)")];

  // Returns the parts after a question's cell, without headings and other questions: all parts up to the measured result, and
  // those after it up to the next question or section.
  function rest(cell) {
    const found = [];
    let measured = false;
    for (const next of blocks.slice(blocks.indexOf(cell) + 1)) {
      const asks = next.querySelector("[data-question]");
      if (measured && (asks || next.matches("h1, h2"))) break;
      if (asks || next.matches(HEADING)) continue;
      measured = measured || next.matches(".tag_measured");
      found.push(next);
    }
    return found;
  }

  const asked = boxes.map((box) => {
    const lines = box.textContent.trim().split("\n");
    const choices = lines.filter((line) => line.startsWith("  ( ) ")).map((line) => line.slice(6));
    const unit = choices.length ? "" : lines.at(-1).replace("____", "").trim();
    const text = lines[0].replace("Predict: ", "");
    return { key: `ringlab: ${box.dataset.question}`, box, text, choices, unit, cell: box.closest(".cell") };
  });

  const keepers = new Map(); // from each part that is kept back to its questions that are still open

  function keepBack(question) {
    for (const part of question.hidden) {
      keepers.set(part, (keepers.get(part) ?? new Set()).add(question));
      part.classList.add("kept-back");
    }
  }

  function show(question, answer) {
    for (const part of question.hidden) {
      keepers.get(part)?.delete(question);
      part.classList.toggle("kept-back", Boolean(keepers.get(part)?.size));
    }
    question.form.querySelectorAll("input, button").forEach((each) => (each.disabled = true));
    question.said.textContent = answer === "" ? "Not answered." : `You predicted: ${answer}. ${measured(question)}`;
  }

  function measured(question) {
    const found = question.hidden.flatMap((part) => (part.matches(".tag_measured") ? part.textContent.match(/^measured: .*$/gm) ?? [] : []));
    return found.length === 1 ? `Measured: ${found[0].slice(10)}.` : "Below is what was measured.";
  }

  function ask(question, number) {
    const id = `question-${number}`;
    const fields = question.choices.length
      ? question.choices.map((choice) => make("label", {}, make("input", { type: "radio", name: id, value: choice, required: "" }), ` ${choice}`))
      : [make("label", {}, make("input", { type: "number", step: "any", name: id, required: "", "aria-label": `Your answer ${question.unit}`.trim() }), ` ${question.unit}`)];
    question.said = make("p", { tabindex: "-1" });
    const skip = make("button", { type: "button", class: "plain" }, "Show it without an answer");
    question.form = make("form", { class: "question" }, make("fieldset", {}, make("legend", {}, `Predict: ${question.text}`), ...fields),
      make("p", {}, make("button", { type: "submit" }, "Compare with what was measured"), " ", skip), question.said);
    question.form.addEventListener("submit", (event) => {
      event.preventDefault();
      const answer = `${new FormData(question.form).get(id)} ${question.unit}`.trim();
      store.set(question.key, answer);
      show(question, answer);
      question.said.focus(); // the buttons are gone
    });
    skip.addEventListener("click", () => {
      store.set(question.key, "");
      show(question, "");
      question.said.focus();
    });
    question.hidden = rest(question.cell);
    question.box.replaceChildren(question.form);
    const before = store.get(question.key);
    if (before !== null) show(question, before);
    else if (store.get(SHOWN)) show(question, "");
    else keepBack(question);
  }

  function showAll() {
    store.set(SHOWN, "yes");
    asked.filter((question) => !question.said.textContent).forEach((question) => show(question, ""));
    all.remove();
    asked[0].said.focus();
  }

  asked.forEach(ask);
  for (const heading of document.querySelectorAll("article section > :is(h2, h3):has(+ .kept-back)")) {
    const others = [...heading.parentElement.children].filter((part) => !part.matches(`${HEADING}, section, span, .kept-back`));
    if (!others.length) heading.after(make("p", { class: "waiting" }, "Answer the question above to open this section."));
  }
  const all = make("button", { type: "button", class: "show-all" }, "Show all answers in all lessons");
  all.addEventListener("click", showAll);
  if (!store.get(SHOWN)) asked[0].cell.before(all);

  // Show a part that is kept back if the address links to a place in it.
  function reveal() {
    const place = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!place || !place.closest(".kept-back")) return;
    asked.filter((question) => question.hidden.some((part) => part.contains(place))).forEach((question) => show(question, ""));
    place.scrollIntoView();
  }
  addEventListener("hashchange", reveal);
  reveal();
})();
