// One layer's attention, forward, on a ring of ranks: when every rank computes, sends and waits.
//
// The numbers equal those of ringlab.cost.simulate, which runs the real ring program. tests/site/test_ring_model.py compares
// the two on random settings. Times are in seconds, sizes in bytes. A setting is
//   { layout, causal, schedule, P, S, H, K, D, machine }
// where machine has flops (per second, as kernels reach them), perNode (ranks), and the links `inside` a node and `between`
// nodes, each { bandwidth, latency }.
"use strict";

const ringModel = (() => {
  const TILE = 128; // rows and keys of a kernel's tile; all of its scores count unless all are masked
  const ELEMENT = 2; // bytes of bfloat16
  const SUM = 4; // bytes of float32, in which results are summed

  const within = (x, most) => Math.max(0, Math.min(x, most));

  // Returns each rank's pieces of tokens, as [first, count]. A striped rank has one piece, with a step of P.
  function pieces(layout, S, P) {
    const ranks = Array.from({ length: P }, (_, rank) => rank);
    if (layout === "striped") return ranks.map((r) => [[r, Math.ceil((S - r) / P)]]);
    const parts = layout === "zigzag" ? 2 * P : P;
    const chunk = Math.ceil(S / parts);
    const piece = (n) => [n * chunk, within(S - n * chunk, chunk)];
    return ranks.map((r) => (layout === "zigzag" ? [piece(r), piece(2 * P - 1 - r)] : [piece(r)]));
  }

  // Returns the scores of a causal square of n rows, in whole tiles.
  function square(n) {
    const full = Math.floor(n / TILE);
    return (TILE * TILE * full * (full + 1)) / 2 + (n - full * TILE) * n;
  }

  // Returns the scores of n rows and m keys if row i sees keys 0 to i + edge.
  function edged(n, m, edge) {
    if (edge <= -n) return 0;
    if (edge >= m - 1) return n * m;
    const first = Math.max(0, -edge);
    const last = Math.min(n, m - edge);
    return square(last - first) + (last - first) * Math.max(0, first + edge) + (n - last) * m;
  }

  // Returns the scores that rank r computes with the keys of rank o.
  function scores(s, own, r, o) {
    const count = (rank) => own[rank].reduce((sum, [, n]) => sum + n, 0);
    if (!s.causal) return count(r) * count(o);
    if (r === o) return square(count(r));
    if (s.layout === "striped") return edged(count(r), count(o), Math.floor((r - o) / s.P));
    let sum = 0;
    for (const [q, rows] of own[r]) for (const [k, keys] of own[o]) if (q > k) sum += rows * keys;
    return sum;
  }

  function link(machine, source, to) {
    const same = Math.floor(source / machine.perNode) === Math.floor(to / machine.perNode);
    return same ? machine.inside : machine.between;
  }

  // Below, `compute[r][s]` is the seconds that rank r needs for its block number s, and `bytes[r]` is the bytes of rank r's
  // keys and values. A schedule returns when each block begins, and each rank's messages in order: [start, end, to, port].

  // While a rank computes on a block, it sends that block on and receives the next one.
  function ring(P, compute, bytes, hop) {
    const begins = compute.map(() => []), hops = compute.map(() => []);
    let now = new Array(P).fill(0);
    for (let step = 0; step < P; step += 1) {
      const ready = now;
      ready.forEach((time, r) => begins[r].push(time));
      if (step === P - 1) break;
      const arrival = ready.map((time, r) => {
        const to = (r + 1) % P, start = Math.max(time, ready[to]);
        const end = hop(r, to, bytes[(r - step + P) % P], start);
        hops[r].push([start, end, to, 0]);
        return end;
      });
      now = ready.map((time, r) => Math.max(time + compute[r][step], arrival[r], arrival[(r - 1 + P) % P]));
    }
    return { begins, hops };
  }

  // Every rank sends its keys to all others, nearest first, then its values; then it computes.
  function allgather(P, compute, bytes, hop, port) {
    let now = new Array(P).fill(0);
    const free = Array.from({ length: P }, () => [0, 0]), hops = compute.map(() => []);
    for (const half of ["keys", "values"]) {
      const done = now.slice();
      for (let r = 0; r < P; r += 1) {
        for (let distance = 1; distance < P; distance += 1) {
          const to = (r + distance) % P;
          const door = port(r, to);
          const start = Math.max(now[r], now[to], free[r][door]);
          const arrival = hop(r, to, bytes[r] / 2, start, (end) => (free[r][door] = end));
          hops[r].push([start, arrival, to, door]);
          done[r] = Math.max(done[r], arrival);
          done[to] = Math.max(done[to], arrival);
        }
      }
      now = done;
    }
    const begins = compute.map((blocks, r) => {
      let time = now[r];
      return blocks.map((seconds) => (time += seconds) - seconds);
    });
    return { begins, hops };
  }

  const SCHEDULES = { ring, allgather };

  function times(s, compute, bytes, fast) {
    const hop = (source, to, size, start, sent = () => {}) => {
      const { bandwidth, latency } = link(s.machine, source, to);
      const end = start + (fast ? 0 : size / bandwidth);
      sent(end);
      return end + (fast ? 0 : latency);
    };
    const port = (source, to) => (link(s.machine, source, to) === s.machine.inside ? 0 : 1);
    const { begins, hops } = SCHEDULES[s.schedule](s.P, compute, bytes, hop, port);
    const ends = begins.map((blocks, r) => blocks[s.P - 1] + compute[r][s.P - 1]);
    return { begins, hops, ends, makespan: Math.max(...ends) };
  }

  // Returns how many blocks of other ranks a rank holds at a time. In a ring it computes on one while the next arrives.
  const others = (s) => (s.schedule === "ring" ? Math.min(2, s.P - 1) : s.P - 1);

  // Returns the most bytes that a rank holds besides its own q, k and v: float32 sums, results, and other ranks' blocks.
  function memory(s, lengths, rank, block) {
    const rows = s.H * lengths[rank];
    const rest = lengths.reduce((sum, n, r) => (r === rank ? sum : sum + n), 0);
    const held = s.schedule === "ring" ? others(s) * Math.max(...lengths) : rest;
    return { sums: rows * (s.D * SUM + 3 * SUM), out: rows * s.D * ELEMENT, blocks: held * block };
  }

  function simulate(s) {
    const own = pieces(s.layout, s.S, s.P);
    const lengths = own.map((parts) => parts.reduce((sum, [, n]) => sum + n, 0));
    const block = 2 * s.K * s.D * ELEMENT; // bytes of a token's key and value
    const perScore = (4 * s.D * s.H) / s.machine.flops;
    const compute = own.map((_, r) => own.map((_, step) => scores(s, own, r, (r - step + s.P) % s.P) * perScore));
    const bytes = lengths.map((n) => n * block);
    const { begins, hops, ends, makespan } = times(s, compute, bytes, false);
    const held = lengths.map((_, r) => memory(s, lengths, r, block));
    const busy = compute.map((blocks) => blocks.reduce((sum, seconds) => sum + seconds, 0));
    const total = busy.reduce((sum, seconds) => sum + seconds, 0);
    const peaks = held.map(({ sums, out, blocks }) => sums + out + blocks);
    return {
      lengths, compute, begins, hops, makespan, busy, held, peaks,
      others: others(s),
      waited: ends.map((end, r) => Math.max(0, end - busy[r])), // a rank does not wait after its end
      exposed: makespan - times(s, compute, bytes, true).makespan,
      busyFraction: makespan ? total / (makespan * s.P) : 1,
      bytesSent: bytes.reduce((sum, each) => sum + each, 0) * (s.P - 1),
      inputs: lengths.map((n) => n * (s.H * s.D * ELEMENT + block)),
      peak: Math.max(...peaks),
    };
  }

  return { simulate };
})();
