// The four figures of "Ring attention in five minutes". They use the model and the views of the playground.
"use strict";

(() => {
  const places = Object.fromEntries([...document.querySelectorAll("[data-five]")].map((each) => [each.dataset.five, each]));
  if (!places.who) return;
  const { colour, make, time } = playViews;
  const offered = JSON.parse(document.getElementById("playground-choices").textContent);
  const STILL = matchMedia("(prefers-reduced-motion: reduce)");
  const machine = offered.machines[0];
  const setting = (changes) => ({ layout: "contiguous", causal: true, schedule: "ring", P: 8, S: 2 ** 17, H: 32, K: 8, D: offered.headDim, machine, ...changes });

  // A slider with a label, which calls `moved` with each value and once at the beginning.
  function slider(label, most, value, moved) {
    const input = make("input", { type: "range", min: 0, max: most, step: 1, value }), said = make("output", {});
    const show = () => {
      said.textContent = moved(Number(input.value));
      input.setAttribute("aria-valuetext", said.textContent);
    };
    input.addEventListener("input", show);
    show();
    return [make("label", { class: "play-player" }, label, input), make("p", { class: "play-caption", "aria-live": "polite" }, said), input];
  }

  function who(place) {
    const P = 4, words = 16, each = words / P, side = 30, above = 70;
    const picture = playViews.svg(words * side, above + side + 22, "Sixteen words on four GPUs. Lines lead from the chosen word to the words that it needs.");
    const owner = (word) => Math.floor(word / each), middle = (word) => (word + 0.5) * side;
    const lines = make("g", {});
    picture.append(lines);
    const boxes = Array.from({ length: words }, (_, word) => {
      const box = make("rect", { x: word * side + 2, y: above, width: side - 4, height: side - 4, rx: 3, fill: colour(owner(word), P), class: "five-word" });
      box.addEventListener("pointerdown", () => { input.value = word; input.dispatchEvent(new Event("input")); });
      picture.append(box);
      return box;
    });
    for (let rank = 0; rank < P; rank += 1) picture.append(make("text", { x: (rank + 0.5) * each * side, y: above + side + 14, class: "play-name" }, `GPU ${rank}`));
    const [label, said, input] = slider("Word", words - 1, 10, (word) => {
      boxes.forEach((box, n) => box.classList.toggle("five-unseen", n > word));
      lines.replaceChildren(...boxes.slice(0, word).map((_, n) => {
        const far = owner(n) !== owner(word), [x1, x2] = [middle(n), middle(word)];
        return make("path", { d: `M${x1} ${above} Q${(x1 + x2) / 2} ${above - Math.min(66, 8 + (x2 - x1) / 4)} ${x2} ${above}`, class: far ? "five-far" : "five-near" });
      }));
      const home = word - owner(word) * each + 1, away = word + 1 - home;
      const others = ["", " GPU 0", " GPUs 0 and 1", " GPUs 0, 1 and 2"][owner(word)];
      return `Word ${word} is on GPU ${owner(word)}. It needs ${word + 1} ${word ? "keys" : "key"}: ${home} of its own GPU${away ? `, and ${away} of${others}` : " alone"}.`;
    });
    place.append(picture, label, said);
  }

  function ring(place) {
    const s = setting({ P: 4, causal: false }), found = ringModel.simulate(s);
    const [picture, follow] = playViews.ringView(s, found), steps = s.P;
    const [label, said, input] = slider("Hops", steps - 1, 0, (hop) => {
      follow(found.begins[0][hop] + 1e-9);
      return hop === 0 ? "Each GPU computes with its own block, and a copy sets out." : hop < steps - 1 ? `After ${hop} hop${hop > 1 ? "s" : ""}: each GPU computes with the block that began ${hop} place${hop > 1 ? "s" : ""} away.` : `After ${hop} hops every query has met every key.`;
    });
    const button = make("button", { type: "button", class: "play-button" }, "Play");
    let started = null;
    const frame = (at) => {
      if (started === null) return;
      const share = Math.min(1, (at - started) / 6000);
      follow(share * found.makespan);
      if (share < 1) return requestAnimationFrame(frame);
      started = null;
      input.value = steps - 1;
      input.dispatchEvent(new Event("input"));
    };
    input.addEventListener("pointerdown", () => (started = null));
    button.addEventListener("click", () => {
      if (STILL.matches) {
        input.value = (Number(input.value) + 1) % steps;
        return input.dispatchEvent(new Event("input"));
      }
      started = performance.now();
      requestAnimationFrame(frame);
    });
    place.append(make("div", { class: "five-ring" }, picture), button, label, said);
  }

  // Both pictures of a layout: the pairs, and the time; `before` is the run to compare with.
  function shown(s, before, old) {
    const found = ringModel.simulate(s), [lines] = playViews.timeline(s, found, () => {}, before);
    lines.querySelector(".play-now").remove(); // nothing plays here
    return [found, lines, playViews.pairsView(s, found, old)];
  }

  function wait(place) {
    const [found, lines, pairs] = shown(setting({}), null, null);
    place.append(make("div", { class: "play-views" }, lines, pairs), make("p", { class: "play-caption" }, `It takes ${time(found.makespan)}, and the GPUs compute ${Math.round(100 * found.busyFraction)} % of the time.`));
  }

  function zigzag(place) {
    const first = ringModel.simulate(setting({})), views = make("div", { class: "play-views" }), said = make("p", { class: "play-headline", "aria-live": "polite" });
    const box = make("fieldset", { class: "play-controls" }, make("legend", {}, "Deal the words out"));
    let pairs = null;
    const choose = (layout) => {
      const before = layout === "contiguous" ? null : { run: first, name: "in order" };
      const [found, lines, next] = shown(setting({ layout }), before, pairs);
      pairs = next;
      views.replaceChildren(lines, pairs);
      const times = first.makespan / found.makespan;
      said.textContent = before ? `${time(found.makespan)}: ${times.toFixed(2)} times as fast, with the same GPUs and the same bytes.` : `In order: ${time(found.makespan)}.`;
    };
    for (const [layout, label] of [["contiguous", "in order"], ["zigzag", "zig-zag"]]) {
      const input = make("input", { type: "radio", name: "five-layout", value: layout, id: `five-${layout}` });
      input.checked = layout === "contiguous";
      input.addEventListener("change", () => choose(layout));
      box.append(make("label", { for: input.id }, input, ` ${label}`));
    }
    choose("contiguous");
    place.append(box, said, views);
  }

  who(places.who);
  ring(places.ring);
  wait(places.wait);
  zigzag(places.zigzag);
})();
