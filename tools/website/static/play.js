// The playground: its controls, and the views of play_views.js for their setting. The address contains the state.
// With data-brief it shows a few controls and the moving views, and links to the page that has all of them.
"use strict";

(() => {
  const root = document.getElementById("playground");
  if (!root) return;
  const { bytes, make, speed, time, tokens, unbroken } = playViews;
  const offered = JSON.parse(document.getElementById("playground-choices").textContent);
  const brief = root.hasAttribute("data-brief");
  const PHONE = matchMedia("(max-width: 46em)");
  const STILL = matchMedia("(prefers-reduced-motion: reduce)");
  const SECONDS = 6; // the time in which a whole timeline is played

  // A story shows one control and asks for a guess. Its text holds for its state, and for the states that its control leads to.
  // `asked` is what the guess is about, in the state that the reader is told to choose.
  const STORIES = [
    {
      name: "Why zig-zag?", moves: ["layout"],
      state: { layout: "contiguous", mask: "causal", schedule: "ring", P: 8, S: 17, H: 32, K: 8, machine: "h100", speed: 0 },
      text: "Dealt out in order, the first rank's tokens see almost nothing, and the last rank's see everything. All ranks wait for the last one. Zig-zag gives each rank one early and one late piece.",
      asks: "How many times the memory does a rank need with zig-zag?", guesses: [0.5, 1, 1.9, 4], unit: "times", then: "Now choose zig-zag.",
      asked: () => ranWith({ layout: "zigzag" }).peak / ranWith({}).peak, reached: () => state.layout === "zigzag",
    },
    {
      name: "A slow link", moves: ["S"],
      state: { layout: "zigzag", mask: "causal", schedule: "ring", P: 8, S: 14, H: 32, K: 8, machine: "h100", speed: -4 },
      text: "With few tokens and a slow link, a block arrives later than the computation on the one before has ended: red lines are messages that a rank waits for. Twice the tokens are four times the computing, but only twice the bytes.",
      asks: "From how many tokens on does nobody wait?", guesses: [15, 17, 19, 21], unit: "tokens", then: "Now move the tokens up.",
      asked: () => hiddenFrom(), reached: () => state.S >= hiddenFrom(),
    },
    {
      name: "Two nodes", moves: ["S"],
      state: { layout: "zigzag", mask: "causal", schedule: "ring", P: 16, S: 16, H: 32, K: 8, machine: "h100", speed: 0 },
      text: "Two of the sixteen hops cross from one node to the other, over a slower link, and every rank ends up waiting for them.",
      asks: "From how many tokens on do the slow hops hide?", guesses: [17, 18, 20, 22], unit: "tokens", then: "Now make the sequence longer.",
      asked: () => hiddenFrom(), reached: () => state.S >= hiddenFrom(),
    },
    {
      name: "All at once", moves: ["schedule"],
      state: { layout: "zigzag", mask: "causal", schedule: "allgather", P: 8, S: 15, H: 32, K: 8, machine: "h100", speed: 0 },
      text: "All-gather fetches all keys and values before it computes: nothing hides, and every rank holds the whole sequence's keys. A ring sends as many bytes, while the ranks compute.",
      asks: "How many times as fast is the ring?", guesses: [1, 1.2, 1.7, 3], unit: "times", then: "Now choose ring.",
      asked: () => seconds({}) / seconds({ schedule: "ring" }), reached: () => state.schedule === "ring",
    },
  ];

  // The seconds of the story's state with these changes, and the fewest tokens, as a power of 2, with which ranks wait less
  // than 1 % of the time for messages.
  const ranWith = (changes) => ringModel.simulate(setting(settled({ ...story.state, ...changes })));
  const seconds = (changes) => ranWith(changes).makespan;
  function hiddenFrom() {
    for (let S = story.state.S; S < offered.tokens[1]; S += 1) {
      const found = ranWith({ S });
      if (found.exposed < 0.01 * found.makespan) return S;
    }
    return offered.tokens[1];
  }

  const CONTROLS = [
    { key: "layout", label: "Layout", kind: "radio", values: brief ? [["contiguous", "contiguous"], ["zigzag", "zig-zag"]] : [["contiguous", "contiguous"], ["striped", "striped"], ["zigzag", "zig-zag"]], named: labelled },
    { key: "mask", label: "Mask", kind: "radio", values: [["causal", "causal"], ["full", "full"]] },
    { key: "schedule", label: "Schedule", kind: "radio", values: [["ring", "ring"], ["allgather", "all-gather"]], named: labelled },
    { key: "P", label: "Ranks (GPUs)", kind: "range", values: offered.ranks, shown: String, named: (n) => `${n} ranks` },
    { key: "S", label: "Tokens", kind: "range", values: span(offered.tokens), shown: (n) => tokens(2 ** n) },
    { key: "H", label: "Query heads", kind: "range", values: offered.heads, shown: String },
    { key: "K", label: "K/V heads", kind: "range", values: offered.kvHeads, shown: String, named: (n) => `${n} K/V head${n === 1 ? "" : "s"}` },
    { key: "machine", label: "Machine", kind: "select", values: offered.machines.map((each) => [each.name, each.title]), named: labelled },
    { key: "speed", label: "Link speed", kind: "range", values: span(offered.speeds), shown: (n) => `${speed(n)}, ${bytes(machine().inside.bandwidth * 2 ** n)}/s in a node`, named: (n) => (n === 0 ? "the machine's own links" : `links of ${speed(n)} speed`) },
  ];

  const IN_BRIEF = ["layout"];
  const WORK = ["S", "H", "mask"]; // times can be compared only between states that are equal in these

  function span([least, most]) {
    return Array.from({ length: most - least + 1 }, (_, n) => least + n);
  }

  function labelled(value) {
    return this.values.find(([each]) => each === value)[1];
  }

  // The state and the address. If the hash is that of a heading, the history entry contains the state instead.

  let state = { ...STORIES[0].state };
  let story = STORIES[0];
  let moved = null; // the setting moved last, and what to compare it with
  let guess = null; // the reader's answer to the story's question

  const names = (text) => CONTROLS.some(({ key }) => new URLSearchParams(text).has(key));
  const addressed = () => location.hash.slice(1);

  // Returns the nearest state that the controls can reach, so that an address cannot lead to any other.
  function settled(next) {
    return { ...next, K: Math.min(next.K, next.H) };
  }

  // Returns the state with the settings that an address or a history entry gives.
  function read(text) {
    const asked = new URLSearchParams(text), next = { ...state };
    for (const control of CONTROLS) {
      const value = asked.get(control.key);
      const known = control.values.map((each) => (Array.isArray(each) ? each[0] : each));
      const found = known.find((each) => String(each) === value);
      if (found !== undefined) next[control.key] = found;
    }
    return settled(next);
  }

  // A choice makes a history entry, so that Back undoes it; the steps of one drag of a slider make one entry together.
  function write(address, isNew) {
    const said = String(new URLSearchParams(Object.entries(state))), hash = `#${address ?? said}`;
    if (brief) document.querySelector('.door[href^="play.html"]')?.setAttribute("href", `play.html#${said}`);
    else if (isNew && location.hash !== hash) history.pushState(said, "", hash);
    else history.replaceState(said, "", hash);
  }

  function begin(next) {
    state = next;
    const found = STORIES.find((each) => Object.entries(each.state).every(([key, value]) => state[key] === value));
    story = found ?? story;
    moved = guess = null;
    arrange(found !== undefined);
    compareWith(story.moves[0]);
  }

  // Keys move a control through several values. Compare all of them with the value before the first move or, for a control
  // that the story moves, with the story's value.
  function compareWith(key) {
    if (moved?.key !== key) moved = { key, from: (story.moves.includes(key) ? story.state : state)[key] };
  }

  function machine(of = state) {
    return offered.machines.find((each) => each.name === of.machine);
  }

  function setting(of = state) {
    const faster = (link) => ({ ...link, bandwidth: link.bandwidth * 2 ** of.speed }), its = machine(of);
    return {
      layout: of.layout, causal: of.mask === "causal", schedule: of.schedule,
      speed: of.speed,
      P: of.P, S: 2 ** of.S, H: of.H, K: of.K, D: offered.headDim,
      machine: { ...its, inside: faster(its.inside), between: faster(its.between) },
    };
  }

  // Controls.

  const inputs = {};

  function control(each) {
    const id = `play-${each.key}`;
    if (each.kind === "radio") {
      const box = make("fieldset", {}, make("legend", {}, each.label));
      for (const [value, label] of each.values) {
        const input = make("input", { type: "radio", name: id, value, id: `${id}-${value}` });
        input.addEventListener("change", () => change(each.key, value));
        box.append(make("label", { for: input.id }, input, label));
      }
      const chosen = () => box.querySelector(`[value="${state[each.key]}"]`);
      inputs[each.key] = () => (chosen().checked = true);
      inputs[each.key].focus = () => chosen().focus();
      return box;
    }
    if (each.kind === "select") {
      const input = make("select", { id }, ...each.values.map(([value, label]) => make("option", { value }, label)));
      input.addEventListener("change", () => change(each.key, input.value));
      inputs[each.key] = () => (input.value = state[each.key]);
      inputs[each.key].focus = () => input.focus();
      return make("div", { class: "play-control" }, make("label", { for: id }, each.label), input);
    }
    const input = make("input", { type: "range", id, min: 0, max: each.values.length - 1, step: 1 });
    const said = make("output", { for: id });
    let dragged = false;
    input.addEventListener("input", () => {
      change(each.key, each.values[input.value], !dragged);
      dragged = true;
    });
    input.addEventListener("change", () => (dragged = false));
    inputs[each.key] = () => {
      input.value = each.values.indexOf(state[each.key]);
      said.textContent = each.shown(state[each.key]);
      input.setAttribute("aria-valuetext", said.textContent);
    };
    inputs[each.key].focus = () => input.focus();
    return make("div", { class: "play-control" }, make("label", { for: id }, each.label, " ", said), input);
  }

  function change(key, value, isNew = true) {
    if (!WORK.includes(key)) compareWith(key);
    state = settled({ ...state, [key]: value });
    stop();
    rest();
    scrub.value = 0;
    update(undefined, isNew);
  }

  // The page.

  const stories = make("div", { class: "play-stories", role: "group", "aria-label": "Examples" });
  const note = make("p", { class: "play-note", "aria-live": "polite" });
  const question = make("div", { class: "play-question", role: "group" });
  const headline = make("p", { class: "play-headline", "aria-live": "polite" });
  const slots = Object.fromEntries(["tokens", "ring", "timeline", "pairs", "memory", "figures", "commands", "table"].map((name) => [name, make("div", { class: `play-${name}` })]));
  const playing = make("button", { type: "button", class: "play-button" }, "Play");
  const scrub = make("input", { type: "range", min: 0, max: 1000, step: 1, value: 0, id: "play-time" });
  let follow = [], ran = null, started = null;

  function moveTo(share) {
    follow.forEach((each) => each(share * ran.makespan));
    scrub.value = Math.round(share * 1000);
    scrub.setAttribute("aria-valuetext", time(share * ran.makespan));
  }

  function seek(share) {
    stop();
    moveTo(share);
  }

  function stop() {
    started = null;
    playing.textContent = "Play";
  }

  function frame(at) {
    if (started === null) return;
    const share = Math.min(1, (at - started) / (SECONDS * 1000));
    moveTo(share);
    if (share < 1) requestAnimationFrame(frame);
    else stop();
  }

  playing.addEventListener("click", () => {
    if (STILL.matches) return moveTo(scrub.value >= 1000 ? 0 : Math.min(1, Number(scrub.value) / 1000 + 0.05));
    if (started !== null) return stop();
    const from = scrub.value >= 1000 ? 0 : scrub.value / 1000;
    started = performance.now() - from * SECONDS * 1000;
    playing.textContent = "Pause";
    requestAnimationFrame(frame);
  });
  scrub.addEventListener("input", () => seek(scrub.value / 1000));

  function fill(name, ...children) {
    slots[name].replaceChildren(...children);
  }

  // Returns the run that this one is compared with, and its name: that of the setting moved last, before its first move.
  function previous() {
    const { key, from } = moved;
    if (WORK.includes(key) || state[key] === from) return null;
    const run = ringModel.simulate(setting(settled({ ...state, [key]: from })));
    return { run, name: CONTROLS.find((each) => each.key === key).named(from) };
  }

  function compared(before) {
    if (before === null) return "";
    const other = before.run.makespan, times = other / ran.makespan;
    if (Math.abs(times - 1) < 0.005) return "";
    const said = (n) => (n < 100 ? n.toPrecision(3) : Math.round(n).toLocaleString("en")), share = Math.round(100 * Math.abs(1 - 1 / times));
    const than = `than with ${before.name} (${time(other)})`;
    return times > 1 ? `, ${share} % less ${than}: ${said(times)} times as fast` : `, ${share} % more ${than}: ${said(1 / times)} times as long`;
  }

  function update(address, isNew = false) {
    STORIES.forEach((each) => each.button.setAttribute("aria-pressed", String(Object.entries(each.state).every(([key, value]) => state[key] === value))));
    Object.values(inputs).forEach((show) => show());
    write(address, isNew);
    const s = setting();
    ran = ringModel.simulate(s);
    tell();
    draw(s);
    headline.textContent = unbroken(brief ? inBrief(s) : inWords(s));
  }

  function inWords(s) {
    const links = s.speed === 0 ? "" : ` over links of ${speed(s.speed)} speed (${bytes(s.machine.inside.bandwidth)}/s in a node)`;
    return `${tokens(s.S)} tokens on ${s.P} × ${s.machine.title}${links}: ${time(ran.makespan)}${compared(previous())}. ${playViews.idle(ran)}${playViews.fitting(s, ran)}`;
  }

  // On the first page: what contiguous costs, or what a layout changes beside it.
  function inBrief(s) {
    const before = previous(), now = time(ran.makespan);
    if (before === null) return `${tokens(s.S)} tokens on ${s.P} GPUs take ${now} (simulated): the GPUs compute ${Math.round(100 * ran.busyFraction)} % of this time and wait ${100 - Math.round(100 * ran.busyFraction)} %.`;
    const was = before.run.makespan;
    return `${now} instead of ${time(was)} (simulated): ${Math.round(100 * (1 - ran.makespan / was))} % less, or ${(was / ran.makespan).toFixed(2)} times as fast. Same GPUs, same bytes.`;
  }

  function draw(s) {
    const [ring, followRing] = playViews.ringView(s, ran);
    const [lines, followLines] = playViews.timeline(s, ran, seek, previous());
    follow = [followRing, followLines];
    caption.textContent = brief ? "Keys and values on their way around the ring" : `${WHAT_MOVES} ${HOW_IT_MOVES[s.schedule]}`;
    dealt.textContent = DEALT[s.layout];
    fill("tokens", playViews.tokensView(s));
    fill("pairs", playViews.pairsView(s, ran, slots.pairs.querySelector("svg")));
    fill("timeline", lines);
    fill("ring", ring);
    if (!brief) {
      fill("memory", playViews.memoryView(s, ran));
      fill("figures", playViews.figures(s, ran));
      fill("commands", playViews.commands(s, offered.models));
      fill("table", playViews.table(s, ran));
    }
    moveTo(scrub.value / 1000);
  }

  for (const each of STORIES) {
    const button = make("button", { type: "button" }, each.name);
    button.addEventListener("click", () => {
      begin({ ...each.state });
      scrub.value = 0;
      update(undefined, true);
      if (PHONE.matches) root.scrollIntoView();
    });
    each.button = button;
    stories.append(button);
  }

  function tell() {
    const told = Object.entries(story.state).every(([key, value]) => story.moves.includes(key) || state[key] === value);
    const text = told ? story.text : "";
    if (note.textContent !== text) note.textContent = text;
    question.hidden = !told || brief;
    if (!question.hidden) ask();
  }

  // Shows the story's question, then what to do, and at last the answer beside the guess.
  function ask() {
    const shown = (n) => (story.unit === "tokens" ? tokens(2 ** n) : String(n)), right = story.asked();
    if (story.reached()) {
      const exact = story.unit === "tokens" ? shown(right) : right.toPrecision(3);
      const said = guess === null ? "" : ` You guessed ${shown(guess)}.`;
      return question.replaceChildren(make("p", { "aria-live": "polite" }, `${story.asks} ${exact} ${story.unit}, in this model.${said}`));
    }
    if (guess !== null) return question.replaceChildren(make("p", { "aria-live": "polite" }, `You guessed ${shown(guess)}. ${story.then}`));
    const buttons = story.guesses.map((value) => {
      const button = make("button", { type: "button" }, shown(value));
      button.addEventListener("click", () => {
        guess = value;
        ask();
        inputs[story.moves[0]].focus();
      });
      return button;
    });
    return question.replaceChildren(make("p", {}, `Guess first: ${story.asks}`), ...buttons);
  }

  function light(rank) {
    root.querySelectorAll("[data-rank]").forEach((each) => each.classList.toggle("play-dim", rank !== null && each.dataset.rank !== rank));
  }
  root.addEventListener("pointerover", (event) => light(event.target.closest("[data-rank]")?.dataset.rank ?? null));
  root.addEventListener("pointerleave", () => light(null));

  const titled = (level, text, ...children) => make("section", {}, make("p", { class: "play-title", role: "heading", "aria-level": level }, text), ...children);
  const time_ = make("div", { class: "play-player" }, playing, make("label", { for: "play-time" }, "Time"), scrub);
  const WHAT_MOVES = "Frames are ranks, which keep their queries. Squares are blocks of keys and values, in the colour of their owner: full while a rank computes on them, pale while it only holds them.";
  const HOW_IT_MOVES = {
    ring: "A copy travels to the next rank, and waits beside it.",
    allgather: "First, copies of all blocks travel to all ranks.",
  };
  const DEALT = {
    contiguous: "Contiguous: each rank has one stretch.",
    striped: "Striped: tokens are dealt one by one.",
    zigzag: "Zig-zag: each has one early, one late piece.",
  };
  const [caption, dealt] = [0, 1].map(() => make("p", { class: "play-caption" }));
  const LANES = [["play-hidden", "message"], ["play-exposed", "its rank waits for it"]];
  const legend = brief ? make("p", { class: "play-caption" }, playViews.READING) : make("p", { class: "play-caption play-lanes" }, ...LANES.map(([name, text]) => make("span", {}, make("i", { class: name }), text)));
  const controls = Object.fromEntries(CONTROLS.filter((each) => !brief || IN_BRIEF.includes(each.key)).map((each) => [each.key, control(each)]));
  const first = make("div", { class: "play-controls play-first" });
  const others = make("div", { class: "play-controls" });
  const all = make("details", { class: "play-all" }, make("summary", {}, "All settings"), others);

  all.open = !PHONE.matches;

  // Puts the story's control in front, and all others behind "All settings", which is open where no story is told.
  function arrange(inStory) {
    for (const [key, each] of Object.entries(controls)) (brief || story.moves.includes(key) ? first : others).append(each);
    all.open ||= !inStory;
  }

  const copy = make("button", { type: "button" }, "Copy link");
  copy.addEventListener("click", async () => {
    const done = await navigator.clipboard?.writeText(location.href).then(() => true, () => false);
    copy.textContent = done ? "Copied" : "Copy the address above";
    setTimeout(() => (copy.textContent = "Copy link"), 2000);
  });
  const save = make("button", { type: "button" }, "Save picture");
  save.addEventListener("click", () => playViews.saved(slots.timeline.querySelector("svg"), `${headline.textContent} (simulated)`, "ring.png"));
  const shared = make("p", { class: "play-share-it" }, copy, save);

  const moving = [
    make("div", { class: "play-now-set" }, first),
    headline,
    titled(2, "Who holds which tokens, from the first to the last", slots.tokens, dealt),
    make("div", { class: "play-views" },
      make("div", { class: "play-left" }, make("div", { class: "play-when" }, slots.timeline, legend, time_), ...(brief ? [] : [all, shared])),
      make("div", { class: "play-right" }, slots.pairs, make("div", { class: "play-where" }, slots.ring, caption))),
  ];

  // A box that is open, but on a phone.
  function folded(name, ...children) {
    const box = make("details", { class: "play-folded" }, make("summary", {}, name), ...children);
    box.open = !PHONE.matches;
    return box;
  }

  // The first page's figure moves once by itself: contiguous, a pause, zig-zag. Whoever touches it stops it.
  let show = [];
  function rest() {
    show.forEach(clearTimeout);
    show = [];
  }
  function once() {
    if (STILL.matches) return;
    const turn = () => {
      compareWith("layout");
      state = { ...story.state, layout: "zigzag" };
      scrub.value = 0;
      update();
      playing.click();
    };
    show = [setTimeout(() => playing.click(), 800), setTimeout(turn, 800 + SECONDS * 1000 + 1200)];
    root.addEventListener("pointerdown", rest, { once: true });
  }

  if (brief) root.replaceChildren(...moving);
  else root.replaceChildren(
    stories, note, question, ...moving,
    folded("Memory of a rank, for this layer", slots.memory, slots.figures),
    folded("On a command line", slots.commands),
    make("details", {}, make("summary", {}, "Every rank in numbers"), slots.table),
  );
  begin(brief ? state : read(names(addressed()) ? addressed() : history.state ?? ""));
  if (!brief) addEventListener("hashchange", () => {
    if (!names(addressed())) return write(addressed());
    begin(read(addressed()));
    update();
  });
  let drawn = root.clientWidth;
  addEventListener("resize", () => {
    if (root.clientWidth === drawn) return;
    drawn = root.clientWidth;
    draw(setting());
  });
  update(brief || !addressed() || names(addressed()) ? undefined : addressed());
  if (brief) once();
})();
