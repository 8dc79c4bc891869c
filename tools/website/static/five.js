// The figures of "Ring attention in five minutes". They use the model and the views of the playground. The page calls
// fiveMinutes(name) directly below each figure's place.
"use strict";

const fiveMinutes = (() => {
  const { bytes, colour, make, speed, time, tokens, unbroken } = playViews;
  const offered = JSON.parse(document.getElementById("playground-choices").textContent);
  const STILL = matchMedia("(prefers-reduced-motion: reduce)");
  const machine = offered.machines[0];
  const setting = (changes) => ({ layout: "contiguous", causal: true, schedule: "ring", P: 8, S: 2 ** 17, H: 32, K: 8, D: offered.headDim, machine, ...changes });
  const percent = (share) => `${Math.round(100 * share)} %`;

  // A slider with a label, which calls `moved` with each value.
  function slider(label, [least, most], value, moved) {
    const input = make("input", { type: "range", min: least, max: most, step: 1, value });
    input.addEventListener("input", () => moved(Number(input.value)));
    return [make("label", { class: "play-player" }, label, input), input];
  }

  const caption = () => make("p", { class: "play-caption five-said", "aria-live": "polite" });

  function tell(said, text, ...inputs) {
    said.textContent = unbroken(text);
    inputs.forEach((input) => input.setAttribute("aria-valuetext", said.textContent));
  }

  function who(place) {
    const P = 4, words = 12, each = words / P, width = playViews.room(), side = width / words, above = 70;
    const picture = playViews.svg(width, above + side + 20, "Twelve words on four GPUs. Lines lead from the chosen word to the words that it needs.");
    const owner = (word) => Math.floor(word / each), middle = (word) => (word + 0.5) * side;
    const lines = make("g", {});
    picture.append(lines);
    const boxes = Array.from({ length: words }, (_, word) => {
      const box = make("rect", { x: word * side + 2, y: above, width: side - 4, height: side - 4, rx: 3, fill: colour(owner(word), P), class: "five-word" });
      box.addEventListener("pointerdown", () => { input.value = word + 1; show(word); });
      picture.append(box);
      return box;
    });
    for (let rank = 0; rank < P; rank += 1) picture.append(make("text", { x: (rank + 0.5) * each * side, y: above + side + 13, class: "play-name" }, `GPU ${rank}`));
    const said = caption(), [label, input] = slider("Word", [1, words], 8, (number) => show(number - 1));
    function show(word) {
      boxes.forEach((box, n) => box.classList.toggle("five-unseen", n > word));
      lines.replaceChildren(...boxes.slice(0, word).map((_, n) => {
        const far = owner(n) !== owner(word), [x1, x2] = [middle(n), middle(word)];
        return make("path", { d: `M${x1} ${above} Q${(x1 + x2) / 2} ${above - Math.min(66, 8 + (x2 - x1) / 4)} ${x2} ${above}`, class: far ? "five-far" : "five-near" });
      }));
      const home = word - owner(word) * each + 1, away = word + 1 - home;
      const others = ["", " GPU 0", " GPUs 0 and 1", " GPUs 0, 1 and 2"][owner(word)];
      tell(said, `Word ${word + 1} is on GPU ${owner(word)}. It needs ${word + 1} ${word ? "keys" : "key"}, its own included: ${home} of its own GPU${away ? `, and ${away} of${others}` : " alone"}.`, input);
    }
    show(7);
    place.append(picture, label, said);
  }

  function ring(place) {
    const s = setting({ P: 4, causal: false }), found = ringModel.simulate(s), last = s.P - 1, begins = found.begins[0];
    const [picture, follow] = playViews.ringView(s, found), said = caption();
    const [label, input] = slider("Hops", [0, last], 0, (hop) => { stop(); show(hop); });
    const button = make("button", { type: "button", class: "play-button" }, "Play");
    let started = null, shown = null;

    // Shows a moment, and says how many hops have been made by then.
    function at(now) {
      follow(now);
      const hop = begins.findLastIndex((begin) => begin <= now);
      if (hop === shown) return;
      shown = input.value = hop;
      const places = `${hop} place${hop > 1 ? "s" : ""}`;
      tell(said, hop === 0 ? "Each GPU computes with its own block, and a copy sets out." : `After ${hop} hop${hop > 1 ? "s" : ""}, each GPU computes with the block that began ${places} away.${hop === last ? " Then every query has met every key." : ""}`, input);
    }
    const show = (hop) => at(begins[hop] + 1e-9);

    function stop() {
      started = null;
      button.textContent = "Play";
    }
    function frame(now) {
      if (started === null) return;
      const share = Math.min(1, (now - started) / 8000);
      at(share * found.makespan);
      if (share < 1) requestAnimationFrame(frame);
      else stop();
    }
    button.addEventListener("click", () => {
      const from = shown === last ? 0 : begins[shown] / found.makespan;
      if (STILL.matches) return show((shown + 1) % s.P);
      if (started !== null) return stop();
      started = performance.now() - from * 8000;
      button.textContent = "Pause";
      requestAnimationFrame(frame);
    });
    show(0);
    place.append(make("div", { class: "five-ring" }, picture), make("div", { class: "play-player" }, button, label), said);
  }

  // The weights and values of one query's words, block by block: what it has so far, and what the next block adds.
  function merge(place) {
    const P = 4, each = 3, width = playViews.room(), side = width / (P * each), high = 70;
    const scores = [0.4, 1.3, -0.2, 0.9, -0.8, 1.6, 0.1, 1.1, -0.5, 0.7, 1.8, 0.3], values = [3, 8, 1, 6, 9, 2, 7, 4, 5, 1, 9, 6];
    const weights = scores.map(Math.exp), most = Math.max(...weights), round = (x) => x.toFixed(2);
    const picture = playViews.svg(width, high + 40, "The weights of twelve words for one query, as bars, with their values below. The words are in four blocks.");
    const bars = weights.map((weight, n) => {
      const tall = (weight / most) * high;
      const bar = make("rect", { x: n * side + 3, y: high - tall, width: side - 6, height: tall, fill: colour(Math.floor(n / each), P), class: "five-word" });
      picture.append(bar, make("text", { x: (n + 0.5) * side, y: high + 15, class: "play-name" }, String(values[n])));
      return bar;
    });
    for (let block = 0; block < P; block += 1) picture.append(make("text", { x: (block + 0.5) * each * side, y: high + 33, class: "play-name" }, `block ${block + 1}`));
    const of = (from, to) => {
      const sum = weights.slice(from, to).reduce((a, b) => a + b);
      return { sum, average: weights.slice(from, to).reduce((total, weight, n) => total + weight * values[from + n], 0) / sum };
    };
    const said = caption(), [label, input] = slider("Blocks", [1, P], 2, show);
    function show(blocks) {
      bars.forEach((bar, n) => bar.classList.toggle("five-unseen", n >= blocks * each));
      let now = of(0, each), text = `Block 1: average ${round(now.average)}, sum of weights ${round(now.sum)}.`;
      for (let block = 1; block < blocks; block += 1) {
        const next = of(block * each, (block + 1) * each), sum = now.sum + next.sum;
        const both = { sum, average: (now.sum * now.average + next.sum * next.average) / sum };
        text = `So far: average ${round(now.average)}, sum ${round(now.sum)}. Block ${block + 1}: average ${round(next.average)}, sum ${round(next.sum)}. ` +
          `Together: (${round(now.sum)} × ${round(now.average)} + ${round(next.sum)} × ${round(next.average)}) / ${round(sum)} = ${round(both.average)}.`;
        now = both;
      }
      tell(said, `${text} One softmax over these ${blocks * each} words at once: ${round(of(0, blocks * each).average)}.`, input);
    }
    show(2);
    place.append(picture, label, said);
  }

  // How long a GPU computes on a whole block, and how long a block is on its way.
  function hop(place) {
    const width = playViews.room(), left = 76, row = 26, said = caption();
    const picture = playViews.svg(width, 2 * row + 12, "Two bars: the time of computing on a block, and the time of a hop.");
    const [work, way, late] = ["play-share", "play-hidden", "play-exposed"].map((name, n) => make("rect", { y: 4 + Math.min(n, 1) * (row + 4), height: row - 4, class: name }));
    picture.append(work, way, late, ...["computing", "hop"].map((name, n) => make("text", { x: left - 8, y: 4 + n * (row + 4) + 15, class: "play-row-name" }, name)));
    const [first, S] = slider("Words", [13, 20], 15, show), [second, links] = slider("Link", offered.speeds, -2, show);
    function show() {
      const n = 2 ** links.value, faster = (link) => ({ ...link, bandwidth: link.bandwidth * n });
      const s = setting({ causal: false, S: 2 ** S.value, machine: { ...machine, inside: faster(machine.inside) } });
      const found = ringModel.simulate(s), block = found.compute[0][0], [[start, end]] = found.hops[0], onWay = end - start;
      const scale = (width - left - 4) / Math.max(block, onWay), hidden = Math.min(block, onWay);
      for (const [box, from, to] of [[work, 0, block], [way, 0, hidden], [late, hidden, onWay]]) {
        box.setAttribute("x", left + from * scale);
        box.setAttribute("width", (to - from) * scale);
      }
      const told = onWay <= block ? "The hop hides." : `The hop is too long: in each step every GPU waits ${time(onWay - block)} (red).`;
      tell(said, `${tokens(s.S)} words on eight GPUs, over links of ${speed(Number(links.value))} speed (${bytes(s.machine.inside.bandwidth)}/s): computing on a block takes ${time(block)}, a hop ${time(onWay)}. ${told}`, S, links);
    }
    show();
    place.append(picture, first, second, said);
  }

  function zigzag(place) {
    const first = ringModel.simulate(setting({})), views = make("div", { class: "play-views" }), said = make("p", { class: "play-headline", "aria-live": "polite" });
    const box = make("fieldset", {}, make("legend", {}, "Deal the words out")), question = make("div", { class: "play-question", role: "group" });
    const inputs = {};
    let pairs = null, guess = null;
    const choose = (layout) => {
      const before = layout === "contiguous" ? null : { run: first, name: "in order" };
      const found = ringModel.simulate(setting({ layout })), [lines] = playViews.timeline(setting({ layout }), found, () => {}, before);
      lines.querySelector(".play-now").remove(); // nothing plays here
      pairs = playViews.pairsView(setting({ layout }), found, pairs);
      views.replaceChildren(lines, pairs);
      inputs[layout].checked = true;
      const busy = Math.round(100 * found.busyFraction), times = (first.makespan / found.makespan).toFixed(2);
      said.textContent = unbroken(before
        ? `${time(found.makespan)}: nobody waits, so it takes ${percent(1 - found.makespan / first.makespan)} less time and is ${times} times as fast, on the same GPUs.`
        : `In order, it takes ${time(first.makespan)}. The GPUs compute ${busy} % of this time and wait ${100 - busy} %.`);
      if (before) question.replaceChildren(make("p", { "aria-live": "polite" }, unbroken(`Does zig-zag send more bytes? No. The GPUs send ${bytes(first.bytesSent)} in order and ${bytes(found.bytesSent)} in zig-zag, because the blocks are as large and make as many hops.${guess === null ? "" : ` You guessed: ${guess}.`}`)));
    };
    question.append(make("p", {}, "Guess first: does zig-zag send more bytes?"), ...["fewer", "the same", "more"].map((amount) => {
      const button = make("button", { type: "button" }, amount);
      button.addEventListener("click", () => {
        guess = amount;
        choose("zigzag");
        inputs.zigzag.focus();
      });
      return button;
    }));
    for (const [layout, label] of [["contiguous", "in order"], ["zigzag", "zig-zag"]]) {
      inputs[layout] = make("input", { type: "radio", name: "five-layout", value: layout, id: `five-${layout}` });
      inputs[layout].addEventListener("change", () => choose(layout));
      box.append(make("label", { for: `five-${layout}` }, inputs[layout], label));
    }
    choose("contiguous");
    place.append(question, make("div", { class: "play-controls" }, box), said, views);
  }

  const figures = { who, ring, merge, hop, zigzag };
  return (name) => figures[name](document.querySelector(`[data-five="${name}"]`));
})();
