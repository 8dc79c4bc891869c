// Views of the results of ring_model.js for a setting: pictures, numbers, a table, commands. They keep no state.
"use strict";

const playViews = (() => {
  const COLOURS = ["#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#BBBBBB"];
  const RAMP = [[255, 214, 102], [60, 170, 160], [38, 84, 168]]; // light to dark, for more ranks than there are colours

  // Returns the colour of a rank of P. Beyond eight ranks, colours run from the first rank to the last, and none comes twice.
  function colour(rank, P) {
    if (P <= COLOURS.length) return COLOURS[rank];
    const at = (rank / (P - 1)) * (RAMP.length - 1), low = Math.min(RAMP.length - 2, Math.floor(at));
    return `rgb(${RAMP[low].map((from, n) => Math.round(from + (at - low) * (RAMP[low + 1][n] - from))).join(" ")})`;
  }

  function speed(n) {
    if (n === 0) return "the machine's own";
    return n < 0 ? `1/${2 ** -n} of the machine's` : `${2 ** n} times the machine's`;
  }

  function tokens(n) {
    return n >= 2 ** 20 ? `${n / 2 ** 20}Mi` : `${n / 2 ** 10}Ki`;
  }

  // Three significant digits, with a unit.
  function short(value, units) {
    let n = 0;
    while (n < units.length - 1 && value >= 999.5) [value, n] = [value / 1000, n + 1];
    return `${value >= 99.95 || value === 0 ? Math.round(value) : value.toPrecision(3)} ${units[n]}`;
  }
  const time = (s) => (s === 0 ? "0 s" : short(s * 1e9, ["ns", "µs", "ms", "s"]));
  const bytes = (n) => short(n, ["B", "kB", "MB", "GB", "TB"]);

  // The 80 GB in the name of an A100 are GiB.
  const capacity = (n) => `${bytes(n)} (${Number((n / 2 ** 30).toPrecision(3))} GiB)`;

  const within = (share) => Math.max(0, Math.min(1, share));
  // Keeps numbers and their units on one line.
  const unbroken = (text) => text.replace(/(\d|×) (?=[%×]|[nµm]?s\b|[kMGT]?B\b)/g, "$1\u00a0");
  const percent = (share) => `${share < 0.1 ? (100 * share).toFixed(1) : Math.round(100 * share)} %`;

  const XML = "http://www.w3.org/2000/svg";
  function make(name, attributes = {}, ...children) {
    const svg = ["svg", "g", "rect", "path", "circle", "line", "text", "pattern", "defs", "title"].includes(name);
    const found = svg ? document.createElementNS(XML, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
    found.append(...children);
    return found;
  }

  // Views. Each returns an element. An element that depends on the time has a function that moves it to a given time.

  const HATCH = "play-hatch";
  // Returns the width of a picture in its own units, with which its text is as large on a phone as on a screen. share: the part
  // of the page's width that it has on a screen.
  const WIDE = matchMedia("(min-width: 46.01em)");
  const room = (share = 1) => Math.max(320, Math.min(640, document.querySelector(".playground").clientWidth * (WIDE.matches ? share : 1)));
  const READING = "Each row is a GPU (a rank). A colour shows whose keys and values it works on. The GPU waits where its row is hatched.";
  const BLOCK = 0.62; // the side of a block, as a share of its rank's frame

  function svg(width, height, words, ...children) {
    const hatch = make("pattern", { id: HATCH, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      make("line", { x1: 0, y1: 0, x2: 0, y2: 6, class: "play-wait" }));
    return make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words }, make("defs", {}, hatch), ...children);
  }

  function ringView(s, found) {
    const size = 300, middle = size / 2, radius = s.P > 24 ? 128 : 112;
    const side = Math.min(26, (2 * Math.PI * radius) / s.P / 1.7);
    const at = (place, r = radius) => {
      const angle = (2 * Math.PI * place) / s.P - Math.PI / 2;
      return [middle + r * Math.cos(angle), middle + r * Math.sin(angle)];
    };
    const square = (width, attributes) => make("rect", { width, height: width, rx: 3, ...attributes });
    const put = (box, [x, y]) => {
      box.setAttribute("x", x - box.getAttribute("width") / 2);
      box.setAttribute("y", y - box.getAttribute("width") / 2);
    };
    const picture = svg(size, size, `A ring of ${s.P} ranks. Each rank stays where it is, with its queries, in a frame of its colour. The squares are blocks of keys and values, in the colour of their rank.`);
    picture.append(make("circle", { cx: middle, cy: middle, r: radius, class: "play-way" }));
    for (let first = 0; s.P > s.machine.perNode && first < s.P; first += s.machine.perNode) {
      const [[x1, y1], [x2, y2]] = [at(first - 0.5, radius - 16), at(first - 0.5, radius + 16)];
      picture.append(make("line", { x1, y1, x2, y2, class: "play-border" }));
    }
    const centre = make("text", { x: middle, y: middle, class: "play-centre" });
    const here = [], moving = [];
    for (let rank = 0; rank < s.P; rank += 1) {
      const edge = square(side, { "data-rank": rank, class: "play-edge" });
      const frame = square(side, { "data-rank": rank, class: "play-rank", stroke: colour(rank, s.P) });
      const box = square(BLOCK * side, { "data-rank": rank, class: "play-here" });
      const others = [0, 1].map(() => square(BLOCK * side, { "data-rank": rank, class: "play-moving", visibility: "hidden" }));
      put(edge, at(rank));
      put(frame, at(rank));
      put(box, at(rank));
      here.push(box);
      moving.push(others);
      picture.append(edge, frame, box, ...others);
      if (s.P <= 16) {
        const [x, y] = at(rank, radius + side / 2 + 13);
        picture.append(make("text", { x, y: y + 4, class: "play-name" }, String(rank)));
      }
    }
    picture.append(centre);
    // The place of each message, and the origin of its block. In a ring a copy of the block moves to the next rank, and waits
    // beside that rank until the rank begins to use it.
    const latest = (hops, now) => hops.findLastIndex(([start]) => start <= now);
    const circling = (rank, port, now) => {
      const hops = port === 0 ? found.hops[rank] : [], sent = latest(hops, now);
      if (sent < 0 || now >= found.begins[(rank + 1) % s.P][sent + 1]) return null;
      const [start, end] = hops[sent];
      return [at(rank + 0.25 + 0.5 * within((now - start) / Math.max(end - start, 1e-30))), (rank - sent + s.P) % s.P];
    };
    const crossing = (rank, port, now) => {
      const hops = found.hops[rank].filter((hop) => hop[3] === port), sent = latest(hops, now);
      if (sent < 0 || now >= hops[sent][1]) return null;
      const [start, end, to] = hops[sent], share = within((now - start) / (end - start));
      const [[x1, y1], [x2, y2]] = [at(rank), at(to)];
      return [[x1 + share * (x2 - x1), y1 + share * (y2 - y1)], rank];
    };
    const under = s.schedule === "ring" ? circling : crossing;
    const follow = (now) => {
      let computing = 0;
      here.forEach((box, rank) => {
        const begins = found.begins[rank];
        let step = begins.length - 1;
        while (step > 0 && begins[step] > now) step -= 1;
        const began = begins[step] <= now;
        const busy = began && now < begins[step] + found.compute[rank][step];
        computing += busy;
        box.setAttribute("fill", colour((rank - step + s.P) % s.P, s.P));
        box.classList.toggle("play-idle", !busy);
        moving[rank].forEach((box, port) => {
          const way = under(rank, port, now);
          box.setAttribute("visibility", way ? "visible" : "hidden");
          if (!way) return;
          put(box, way[0]);
          box.setAttribute("fill", colour(way[1], s.P));
        });
      });
      centre.textContent = `${computing} of ${s.P} compute`;
    };
    return [picture, follow];
  }

  // Returns the stretches of time in which messages to a rank are on their way: [from, to, whether the rank waits meanwhile]. A
  // rank that has computed its last block waits for no message, although blocks still pass through it.
  function lane(s, found, rank) {
    const busy = found.begins[rank].map((begin, step) => [begin, begin + found.compute[rank][step]]).filter(([from, to]) => to > from);
    const sources = s.schedule === "ring" ? [(rank - 1 + s.P) % s.P] : found.hops.keys();
    const coming = [...sources].flatMap((source) => found.hops[source].filter((hop) => hop[2] === rank)).sort(([a], [b]) => a - b);
    const last = Math.max(...busy.map(([from]) => from)), parts = [];
    const idle = (from, to) => {
      if (from < last) parts.push([from, Math.min(to, last), true]);
      if (to > last) parts.push([Math.max(from, last), to, false]);
    };
    let until = 0;
    for (const [start, end] of coming) {
      let from = Math.max(start, until);
      until = Math.max(until, end);
      for (const [begin, stop] of busy) {
        if (stop <= from || begin >= end) continue;
        if (begin > from) idle(from, begin);
        parts.push([Math.max(begin, from), Math.min(stop, end), false]);
        from = Math.min(stop, end);
      }
      if (end > from) idle(from, end);
    }
    return parts;
  }

  // Each rank's row: its computing in the colours of the blocks' owners, and below it the messages to this rank. `before` is
  // another run, drawn as an outline on the same axis: { run, name }.
  function timeline(s, found, seek, before = null) {
    const width = room(0.62), left = 52, top = 22, row = Math.max(4, Math.min(26, 250 / s.P)), thin = row >= 8 ? 4 : 0, gap = row > 8 ? 4 : 1;
    const span = Math.max(found.makespan, before?.run.makespan ?? 0), high = s.P * (row + thin + gap);
    const height = top + high + 26, scale = (width - left - 8) / span;
    const words = `Timeline of ${s.P} ranks: it ends after ${time(found.makespan)}, and ranks compute ${Math.round(100 * found.busyFraction)} percent of the time.`;
    const compared = before ? ` With ${before.name} it ends after ${time(before.run.makespan)}.` : "";
    const picture = svg(width, height, words + compared);
    for (let rank = 0; rank < s.P; rank += 1) {
      const y = top + rank * (row + thin + gap), group = make("g", { "data-rank": rank });
      group.append(make("rect", { x: left, y, width: found.makespan * scale, height: row, fill: `url(#${HATCH})`, class: s.P > 16 ? "play-row play-flat" : "play-row" }));
      found.begins[rank].forEach((begin, step) => {
        const seconds = found.compute[rank][step];
        if (seconds * scale < 0.05) return;
        group.append(make("rect", { x: left + begin * scale, y, width: Math.max(0.4, seconds * scale), height: row, fill: colour((rank - step + s.P) % s.P, s.P), class: "play-work" }));
      });
      if (thin) for (const [from, to, waits] of lane(s, found, rank)) {
        group.append(make("rect", { x: left + from * scale, y: y + row + 1, width: Math.max(0.4, (to - from) * scale), height: thin - 1, class: waits ? "play-exposed" : "play-hidden" }));
      }
      if (before && thin && before.run.begins[rank]) { // it may have had fewer ranks
        const { begins, compute } = before.run; // a block of which the rank sees nothing takes no time
        const end = Math.max(...begins[rank].map((begin, step) => (compute[rank][step] ? begin + compute[rank][step] : 0)));
        group.append(make("rect", { x: left, y, width: end * scale, height: row, class: "play-before" }));
      }
      if (s.P <= 24 || rank % 8 === 0) group.append(make("text", { x: left - 6, y: y + row / 2 + 4, class: "play-row-name" }, s.P <= 16 ? `rank ${rank}` : String(rank)));
      picture.append(group);
    }
    const end = left + found.makespan * scale;
    picture.append(make("text", { x: left, y: height - 6, class: "play-axis" }, "0"), make("text", { x: Math.max(end, left + 60), y: height - 6, class: "play-axis play-end" }, time(found.makespan)));
    if (before) picture.append(...outlined(found, before, left, end, scale, top, high, width));
    const line = make("line", { y1: top - 5, y2: height - 20, class: "play-now" });
    picture.append(line);
    picture.addEventListener("pointerdown", (event) => {
      const box = picture.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * width;
      seek(within((x - left) / (found.makespan * scale)));
    });
    return [picture, (now) => ["x1", "x2"].forEach((x) => line.setAttribute(x, left + now * scale))];
  }

  // Returns the end of the run before, and the time that is saved or lost.
  function outlined(found, before, left, end, scale, top, high, width) {
    const other = left + before.run.makespan * scale, [from, to] = [Math.min(end, other), Math.max(end, other)];
    const share = Math.round((100 * (found.makespan - before.run.makespan)) / before.run.makespan);
    const said = `${before.name}: ${time(before.run.makespan)}`, marked = `${share > 0 ? "+" : "\u2212"}${Math.abs(share)} %`;
    const middle = (from + to) / 2, parts = [make("line", { x1: other, x2: other, y1: top - 4, y2: top + high, class: "play-before-end" })];
    parts.push(make("text", { x: Math.min(other, width - 8), y: top - 8, class: "play-end" }, said));
    if (share !== 0 && to - from > 60) parts.push(make("text", { x: middle, y: top + high / 4 + 8, class: "play-saved" }, marked));
    return parts;
  }

  // Returns the owner of part n of N equal parts of the sequence; 2 P divides N.
  function owner(layout, n, N, P) {
    if (layout === "striped") return n % P;
    if (layout === "contiguous") return Math.floor((n * P) / N);
    const chunk = Math.floor((n * 2 * P) / N);
    return Math.min(chunk, 2 * P - 1 - chunk);
  }

  function tokensView(s) {
    const width = room(), N = 2 * s.P * Math.max(1, Math.round(48 / s.P));
    const picture = svg(width, 18, `The sequence from its first token to its last, in the colours of the ranks that hold it: ${s.layout}.`);
    for (let n = 0; n < N; n += 1) {
      const rank = owner(s.layout, n, N, s.P);
      picture.append(make("rect", { x: (n * width) / N, y: 1, width: width / N + 0.3, height: 16, fill: colour(rank, s.P), "data-rank": rank }));
    }
    return picture;
  }

  // All pairs of a query and a key, in the colour of the rank that computes them, and beside them each rank's sum. `old` is
  // the picture of another layout of the same ranks and mask, which changes into this one.
  function pairsView(s, found, old = null) {
    const N = 2 * s.P * Math.max(1, Math.round(24 / s.P)), size = 150, left = 20, top = 16, beside = left + size + 46, width = 306;
    const of = `${s.P} ${s.causal}`, most = Math.max(...found.busy), bar = size / s.P;
    const words = `Queries from the first to the last, downwards, and the keys that each sees, in the colour of the rank that computes them. Ranks compute from ${time(Math.min(...found.busy))} to ${time(most)}.`;
    let picture = old;
    if (old?.dataset.of !== of) {
      picture = svg(width, size + top + 6, words, make("text", { x: left, y: 11 }, "keys \u2192"), make("text", { x: 8, y: top + 2, class: "play-down" }, "queries \u2192"), make("text", { x: width - 4, y: 11, class: "play-end" }));
      picture.dataset.of = of;
      for (let n = 0; n < N; n += 1) picture.append(make("rect", { x: left, y: top + (n * size) / N, width: (size * (s.causal ? n + 1 : N)) / N, height: size / N + 0.2, class: "play-pairs" }));
      for (let rank = 0; rank < s.P; rank += 1) {
        picture.append(make("rect", { x: beside, y: top + rank * bar, height: Math.max(1, bar - (bar > 5 ? 2 : 0)), width: 0, fill: colour(rank, s.P), class: "play-sum", "data-rank": rank }));
        if (s.P <= 16 && rank % (s.P > 12 ? 2 : 1) === 0) picture.append(make("text", { x: beside - 5, y: top + (rank + 0.5) * bar + 3, class: "play-row-name" }, s.P <= 8 ? `rank ${rank}` : String(rank)));
      }
    }
    picture.setAttribute("aria-label", words);
    picture.querySelector(".play-end").textContent = `work of each rank, up to ${time(most)}`;
    picture.querySelectorAll(".play-pairs").forEach((row, n) => {
      const rank = owner(s.layout, n, N, s.P);
      row.setAttribute("data-rank", rank);
      row.style.fill = colour(rank, s.P);
    });
    const resize = () => picture.querySelectorAll(".play-sum").forEach((each, rank) => (each.style.width = `${(found.busy[rank] / most) * (width - beside - 4)}px`));
    if (picture === old) requestAnimationFrame(resize); // so that the bars move to their new length
    else resize();
    return picture;
  }

  function othersHeld(s, { others }) {
    if (s.schedule !== "ring") return others === 1 ? "the other block" : `all ${others} other blocks`;
    return others === 1 ? "one block of another rank" : "two blocks of others";
  }

  function memoryView(s, found) {
    const rank = found.lengths.indexOf(Math.max(...found.lengths)), held = found.held[rank];
    const parts = [["its own q, k and v", found.inputs[rank], "#0a5b8c"], [othersHeld(s, found), held.blocks, "#4f93bd"], ["sums in float32", held.sums, "#9cc4de"], ["results", held.out, "#c9b79c"]];
    const sum = parts.reduce((total, [, n]) => total + n, 0), most = s.machine.memory, width = room() - 8;
    const picture = svg(room(), 62, `Memory of a rank: ${bytes(sum)} of ${capacity(most)}.`);
    let x = 4;
    for (const [, n, fill] of parts) {
      picture.append(make("rect", { x, y: 4, width: (n / sum) * width, height: 22, fill }));
      x += (n / sum) * width;
    }
    picture.append(make("rect", { x: 4, y: 34, width, height: 8, class: "play-room" }));
    picture.append(make("rect", { x: 4, y: 34, width: Math.max(1, Math.min(1, sum / most) * width), height: 8, class: "play-share" }));
    picture.append(make("text", { x: 4, y: 57 }, `${bytes(sum)}, ${percent(sum / most)} of ${capacity(most)}`));
    const legend = make("ul", { class: "play-legend" }, ...parts.map(([name, n, fill]) => make("li", {}, make("span", { style: `background:${fill}` }), `${name}: ${bytes(n)}`)));
    return make("div", {}, picture, legend);
  }

  // Returns the bytes on the rank that holds most, and whether they fit into its memory.
  function held(s, found) {
    const sum = Math.max(...found.inputs.map((own, rank) => own + found.peaks[rank]));
    return { sum, fits: sum <= s.machine.memory };
  }

  // Returns the causes for which idle ranks wait. The idle time that remains over links without cost is due to ranks with more
  // work, and the rest is due to messages.
  function idle(found) {
    const mean = found.busyFraction * found.makespan, all = found.makespan - mean, share = (100 * all) / found.makespan;
    if (share < 0.05) return "All ranks compute all the time.";
    if (share < 0.5) return "Ranks compute over 99 % of the time.";
    const parts = [["for ranks with more to compute", all - found.exposed], ["for messages", found.exposed]];
    const causes = parts.filter(([, seconds]) => seconds >= 0.1 * all).map(([cause]) => cause); // of two causes, one is at least half
    const digits = share > 99 ? 1 : 0, said = share.toFixed(digits);
    return `On average a rank computes ${(100 - said).toFixed(digits)} % of the time and is idle ${said} %, waiting ${causes.join(" and ")}.`;
  }

  function fitting(s, found) {
    const { sum, fits } = held(s, found);
    return fits ? "" : ` It does not fit: a rank needs ${bytes(sum)} and has ${capacity(s.machine.memory)}.`;
  }

  // Returns the figures. A figure that `ringlab simulate` also prints has the same name here.
  function figures(s, found) {
    const { sum, fits } = held(s, found), blocks = found.compute.flat().filter((seconds) => seconds > 0);
    const [least, most] = [Math.min(...blocks), Math.max(...blocks)];
    const rows = [
      ["makespan", time(found.makespan)],
      ["ranks compute", `${(100 * found.busyFraction).toFixed(1)} % of the time`],
      ["exposed communication", time(Math.max(0, found.exposed))],
      ["longest waiting rank", time(Math.max(...found.waited))],
      ["computing on a block", least < 0.95 * most ? `${time(least)} to ${time(most)}` : time(most)],
      ["slowest hop of a block", time(slowestHop(s, found))],
      ["bytes sent, all ranks", bytes(found.bytesSent)],
      ["peak memory of a rank", bytes(found.peak)],
      ["with its own q, k and v", `${bytes(sum)}: ${fits ? "fits" : "does not fit"}`],
    ];
    return make("dl", { class: "play-figures" }, ...rows.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  }

  function slowestHop(s, found) {
    const slow = s.P > s.machine.perNode ? s.machine.between : s.machine.inside;
    return (Math.max(...found.lengths) * 4 * s.K * s.D) / slow.bandwidth + slow.latency;
  }

  function toml(machine) {
    const rate = (link) => `"${link.bandwidth / 1e9} GB/s"`;
    const link = (name) => `[mine.${name}]\nname = "a link"\nbandwidth = ${rate(machine[name])}\nlatency = "${machine[name].latency * 1e6} us"\nsource = "the playground"\n`;
    return `[mine]\ntitle = "${machine.title}, other links"\nranks_per_node = ${machine.perNode}\nmemory = "${machine.memory / 2 ** 20} MiB"\n` +
      `memory_bandwidth = "${machine.memoryBandwidth / 1e9} GB/s"\nsource = "the playground"\n[mine.flops]\nbfloat16 = "${machine.peak / 1e12} TFLOP/s"\n` +
      link("inside") + link("between") + `[mine.reached]\nattention_forward = "${machine.reached * 100} %"\nsource = "the playground"\n`;
  }

  function commands(s, models) {
    const where = s.speed === 0 ? s.machine.name : "mine.toml";
    const words = ["ringlab simulate", `--tokens ${tokens(s.S)}`, `--ranks ${s.P}`, `--heads ${s.H}`, `--kv-heads ${s.K}`, `--hardware ${where}`, `--layout ${s.layout}`, `--schedule ${s.schedule}`, "--details"];
    if (!s.causal) words.push("--full");
    const model = models.find((each) => each.heads === s.H && each.kvHeads === s.K);
    const nodes = Math.ceil(s.P / s.machine.perNode);
    const lines = ["# the numbers above", words.join(" ")];
    if (model) lines.push("# a training step of a whole model with these heads, on as many nodes", `ringlab plan --model ${model.name} --tokens ${tokens(s.S)} --hardware ${where} --nodes ${nodes}`);
    const box = make("div", {}, make("pre", { tabindex: 0, "aria-label": "Commands" }, lines.join("\n")));
    if (s.speed !== 0) box.append(make("p", {}, "with this machine in ", make("code", {}, "mine.toml"), ":"), make("pre", { tabindex: 0, "aria-label": "mine.toml" }, toml(s.machine)));
    return box;
  }

  function table(s, found) {
    const head = make("tr", {}, ...["Rank", "Tokens", "Computes", "Waits", "Idle after its end", "Peak memory"].map((name) => make("th", { scope: "col" }, make("p", {}, name))));
    const rows = found.busy.map((seconds, rank) => {
      const waited = found.waited[rank], after = Math.max(0, found.makespan - seconds - waited);
      const cells = [found.lengths[rank].toLocaleString("en"), time(seconds), time(waited), time(after), bytes(found.peaks[rank])];
      return make("tr", {}, make("th", { scope: "row" }, String(rank)), ...cells.map((text) => make("td", {}, text)));
    });
    return make("div", { class: "play-table", tabindex: 0, role: "region", "aria-label": "Every rank" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
  }

  // Returns the words that say how to read a timeline.
  function reading(picture) {
    const lanes = picture.querySelector("rect.play-hidden, rect.play-exposed") ? " Thin lines are messages, red while a rank waits for one." : "";
    return `${picture.querySelector(".play-flat") ? READING.replace("hatched", "grey") : READING}${lanes}`;
  }

  // Returns lines of the text that are no wider than `most`.
  function wrapped(text, font, most) {
    const pen = make("canvas").getContext("2d"), lines = [];
    pen.font = font;
    for (const word of text.split(" ")) {
      const longer = lines.length ? `${lines.at(-1)} ${word}` : word;
      if (lines.length && pen.measureText(longer).width <= most) lines[lines.length - 1] = longer;
      else lines.push(word);
    }
    return lines;
  }

  // Saves a timeline as a PNG, in the colours that it has on the page, with a title above and how to read it below.
  function saved(picture, title, name) {
    const copy = picture.cloneNode(true), [, , width, height] = picture.getAttribute("viewBox").split(" ").map(Number), from = [...picture.querySelectorAll("*")];
    [...copy.querySelectorAll("*")].forEach((each, n) => {
      const style = getComputedStyle(from[n]);
      for (const key of ["fill", "stroke", "stroke-width", "stroke-dasharray", "paint-order", "opacity", "fill-opacity", "font", "text-anchor"]) each.style.setProperty(key, style.getPropertyValue(key));
    });
    const edge = 8, high = 14, fill = getComputedStyle(picture).color;
    const [above, below] = [[title, 600], [reading(picture), 400]].map(([text, weight]) => {
      const font = `${weight} 11px sans-serif`;
      return wrapped(text, font, width - 2 * edge).map((line) => make("text", { x: edge, style: `font: ${font}; fill: ${fill}` }, line));
    });
    const start = -(above.length * high + edge), tall = height - start + below.length * high + edge;
    above.forEach((line, n) => line.setAttribute("y", start + edge / 2 + (n + 1) * high - 3));
    below.forEach((line, n) => line.setAttribute("y", height + (n + 1) * high));
    copy.append(...above, ...below);
    copy.setAttribute("viewBox", `0 ${start} ${width} ${tall}`);
    copy.setAttribute("width", 2 * width);
    copy.setAttribute("height", 2 * tall);
    const image = new Image();
    image.addEventListener("load", () => {
      const canvas = make("canvas", { width: 2 * width, height: 2 * tall }), pen = canvas.getContext("2d");
      pen.fillStyle = getComputedStyle(document.body).backgroundColor;
      pen.fillRect(0, 0, canvas.width, canvas.height);
      pen.drawImage(image, 0, 0);
      make("a", { download: name, href: canvas.toDataURL("image/png") }).click();
    });
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
  }

  return { READING, bytes, colour, commands, figures, fitting, idle, make, memoryView, ringView, saved, speed, svg, table, time, timeline, tokens, tokensView, pairsView, room, unbroken };
})();
