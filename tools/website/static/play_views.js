// Views of the results of ring_model.js for a setting: pictures, numbers, a table, commands. They keep no state.
"use strict";

const playViews = (() => {
  const COLOURS = ["#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#BBBBBB"];
  const colour = (rank) => COLOURS[rank % COLOURS.length];

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
  // Returns the width of a picture in its own units, with which its text is as large on a phone as on a screen.
  const room = () => Math.max(340, Math.min(640, document.getElementById("playground").clientWidth));
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
      const frame = square(side, { "data-rank": rank, class: "play-rank", stroke: colour(rank) });
      const box = square(BLOCK * side, { "data-rank": rank, class: "play-here" });
      const others = [0, 1].map(() => square(BLOCK * side, { "data-rank": rank, class: "play-moving", visibility: "hidden" }));
      put(frame, at(rank));
      put(box, at(rank));
      here.push(box);
      moving.push(others);
      picture.append(frame, box, ...others);
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
        box.setAttribute("fill", colour((rank - step + s.P) % s.P));
        box.classList.toggle("play-idle", !busy);
        moving[rank].forEach((box, port) => {
          const way = under(rank, port, now);
          box.setAttribute("visibility", way ? "visible" : "hidden");
          if (!way) return;
          put(box, way[0]);
          box.setAttribute("fill", colour(way[1]));
        });
      });
      centre.textContent = `${computing} of ${s.P} compute`;
    };
    return [picture, follow];
  }

  function timeline(s, found, seek) {
    const width = room(), left = 52, row = Math.max(4, Math.min(30, 270 / s.P)), gap = row > 8 ? 3 : 1;
    const height = 5 + s.P * (row + gap) + 26, scale = (width - left - 8) / found.makespan;
    const words = `Timeline of ${s.P} ranks: it ends after ${time(found.makespan)}, and ranks compute ${Math.round(100 * found.busyFraction)} percent of the time.`;
    const picture = svg(width, height, words);
    for (let rank = 0; rank < s.P; rank += 1) {
      const y = 5 + rank * (row + gap), group = make("g", { "data-rank": rank });
      group.append(make("rect", { x: left, y, width: found.makespan * scale, height: row, fill: `url(#${HATCH})`, class: "play-row" }));
      found.begins[rank].forEach((begin, step) => {
        const seconds = found.compute[rank][step];
        if (seconds * scale < 0.05) return;
        group.append(make("rect", { x: left + begin * scale, y, width: Math.max(0.4, seconds * scale), height: row, fill: colour((rank - step + s.P) % s.P), class: "play-work" }));
      });
      if (s.P <= 24 || rank % 8 === 0) group.append(make("text", { x: left - 6, y: y + row / 2 + 4, class: "play-row-name" }, s.P <= 16 ? `rank ${rank}` : String(rank)));
      picture.append(group);
    }
    picture.append(make("text", { x: left, y: height - 6, class: "play-axis" }, "0"), make("text", { x: width - 8, y: height - 6, class: "play-axis play-end" }, time(found.makespan)));
    const line = make("line", { y1: 0, y2: height - 20, class: "play-now" });
    picture.append(line);
    picture.addEventListener("pointerdown", (event) => {
      const box = picture.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * width;
      seek(within((x - left) / (width - left - 8)));
    });
    return [picture, (now) => ["x1", "x2"].forEach((x) => line.setAttribute(x, left + now * scale))];
  }

  function tokensView(s) {
    const width = room(), parts = { contiguous: s.P, zigzag: 2 * s.P, striped: s.P * Math.max(2, Math.round(96 / s.P)) }[s.layout];
    const owner = (n) => (s.layout === "zigzag" && n >= s.P ? 2 * s.P - 1 - n : n % s.P);
    const picture = svg(width, 18, `The sequence from its first token to its last, in the colours of the ranks that hold it: ${s.layout}.`);
    for (let n = 0; n < parts; n += 1) {
      picture.append(make("rect", { x: (n * width) / parts, y: 1, width: width / parts, height: 16, fill: colour(owner(n)), class: "play-piece", "data-rank": owner(n) }));
    }
    return picture;
  }

  function workView(s, found) {
    const most = Math.max(...found.busy), width = 300, bar = Math.max(3, Math.min(18, 200 / s.P)), gap = bar > 8 ? 3 : 1;
    const least = Math.min(...found.busy);
    const words = `Seconds that each rank computes: from ${time(least)} to ${time(most)}.`;
    const picture = svg(width, s.P * (bar + gap) + 10, words);
    found.busy.forEach((seconds, rank) => {
      const y = 5 + rank * (bar + gap);
      const slowest = seconds > most * (1 - 1e-9);
      const group = make("g", { "data-rank": rank });
      group.append(make("rect", { x: 52, y, width: (seconds / most) * (width - 56), height: bar, fill: colour(rank), class: slowest && least < most * 0.995 ? "play-slowest" : "" }));
      if (s.P <= 24 || rank % 8 === 0) group.append(make("text", { x: 46, y: y + bar / 2 + 4, class: "play-row-name" }, s.P <= 16 ? `rank ${rank}` : String(rank)));
      picture.append(group);
    });
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
    return `On average a rank is idle ${share > 99 ? share.toFixed(1) : share.toFixed(0)} % of the time, waiting ${causes.join(" and ")}.`;
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

  return { bytes, commands, figures, fitting, idle, make, memoryView, ringView, speed, table, time, timeline, tokens, tokensView, workView };
})();
