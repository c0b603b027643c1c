// All-reduce, message by message: who sends which chunk, what each rank holds, what it has sent.
(function () {
  "use strict";

  const { schedule, play, sent, total, busiest, leaving, limit } = FigureLogic.the_ring;
  const LENGTH = 840; // elements; any number of ranks up to 8 divides it
  const NAMES = {
    naive: "naive", ring: "ring", doubling: "recursive doubling", hierarchical: "hierarchical",
  };
  const RULES = {
    naive: "Every rank sends its tensor to rank 0, which adds them and sends the sum back.",
    ring: "In each step, every rank sends one chunk to the next rank.",
    doubling: "Pairs of ranks exchange their whole tensors, then pairs of pairs.",
    hierarchical: "Chunks are summed inside each node, then across the nodes, then copied inside.",
  };
  const ROW = 34;
  const SECONDS_PER_STEP = 1.2;

  const perNode = (w) => w / 2;
  const twoNodes = (state) => state.w % 2 === 0;
  const stepsOf = (state) => schedule(state.way, state.w, LENGTH, perNode(state.w));
  const inUnits = (elements) => elements / LENGTH;

  function clean(state) {
    const w = state.way === "hierarchical" ? Math.max(2, state.w - (state.w % 2)) : state.w;
    const step = Math.min(Math.max(0, Math.trunc(state.step)), stepsOf({ ...state, w }).length);
    return { ...state, w, step };
  }

  // Where the chunks begin and end: everywhere that a message does.
  function chunksOf(steps) {
    const edges = new Set([0, LENGTH]);
    for (const { begin, end } of steps.flat()) edges.add(begin).add(end);
    const sorted = [...edges].sort((a, b) => a - b);
    return sorted.slice(1).map((end, i) => ({ begin: sorted[i], end }));
  }

  // What each rank holds of each chunk after `count` steps: the sum, and of which ranks.
  function held(steps, chunks, w, count) {
    const index = new Map(chunks.map(({ begin }, i) => [begin, i]));
    const last = new Map(chunks.map(({ end }, i) => [end, i + 1]));
    const inChunks = steps.map((step) => step.map((one) => ({
      ...one, begin: index.get(one.begin), end: last.get(one.end),
    })));
    const numbers = Array.from({ length: w }, (_, rank) => chunks.map(() => rank + 1));
    const flags = Array.from({ length: w }, (_, rank) => chunks.map(() => 2 ** rank));
    return {
      sums: play(inChunks, numbers, count),
      ranks: play(inChunks, flags, count).map((row) => row.map((bits) => ones(bits))),
    };
  }

  const ones = (bits) => bits.toString(2).replaceAll("0", "").length;

  // ---- the picture ----------------------------------------------------------------------------

  function draw(svg, given, change, tools) {
    const state = clean(given);
    const { width, text, color, paragraph } = tools;
    const down = paragraph(width / 2, 16, RULES[state.way], width, { "text-anchor": "middle" });
    const steps = stepsOf(state);
    const chunks = chunksOf(steps);
    const wide = width >= 620;
    const now = steps[state.step - 1] ?? [];
    const links = sent(steps, state.w, state.step);
    const place = wide
      ? { x: 145, y: 158 + down, radius: 104, table: 306 }
      : { x: width / 2, y: 150 + down, radius: Math.min(104, width / 2 - 46), table: 2 };
    drawNetwork(place, state, now, links, steps, tools);
    const top = wide ? 44 + down : place.y + place.radius + (twoNodes(state) ? 104 : 66);
    const bottom = drawTable(place.table, top, width - place.table - 2, state, steps, chunks, now, links, tools);
    text(place.x, 16 + down, title(state, steps), {
      "text-anchor": "middle", "font-weight": 600, fill: color.ink,
    });
    tools.height(Math.max(bottom, wide ? place.y + place.radius + 64 : 0));
  }

  function title(state, steps) {
    if (state.step === 0) return `before step 1 of ${steps.length}`;
    return `step ${state.step} of ${steps.length}: ${phase(state, steps)}`;
  }

  function phase({ way, w, step }, steps) {
    if (way === "naive") return step < w ? "rank 0 adds" : "rank 0 sends the sum";
    if (way === "ring") return step < w ? "reduce-scatter" : "all-gather";
    if (way === "doubling") {
      if (steps[step - 1].some((one) => !one.adds)) return "extra ranks get the sum";
      const handOver = steps[step - 1].every(({ to }, i) => to === i); // to ranks 0, 1, …
      return handOver ? "extra ranks send first" : "pairs exchange";
    }
    if (step < perNode(w)) return "reduce-scatter inside";
    return step <= perNode(w) + 1 ? "all-reduce across" : "all-gather inside";
  }

  // The two sides are the two nodes. Ranks go down the left side; on the right side a ring goes up,
  // and elsewhere a rank sits across from the one that has its place in the other node.
  function seat(rank, { way, w }, { x, y, radius }) {
    const mirrored = w % 2 === 0 && rank >= w / 2 && ["hierarchical", "doubling"].includes(way);
    const turn = mirrored ? w + w / 2 - 1 - rank : rank;
    const angle = -Math.PI / 2 - ((turn + 0.5) * 2 * Math.PI) / w;
    return [x + radius * Math.cos(angle), y + radius * Math.sin(angle)];
  }

  function drawNetwork(place, state, now, links, steps, { svg, text, color }) {
    const { w } = state;
    const at = (rank) => seat(rank, state, place);
    const marker = svg("marker", {
      id: "the-ring-arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, orient: "auto",
      markerUnits: "userSpaceOnUse", markerWidth: 12, markerHeight: 12,
    }, svg("defs"));
    svg("path", { d: "M0 0 L8 4 L0 8 z", fill: color.network }, marker);

    if (twoNodes(state)) {
      const { x, y, radius } = place;
      const reach = radius + 34;
      svg("line", { x1: x, x2: x, y1: y - reach + 12, y2: y + reach - 6, stroke: color.muted, "stroke-dasharray": "5 5" });
      const out = leaving(links, perNode(w));
      for (const [node, side, anchor] of [[0, -10, "end"], [1, 10, "start"]]) {
        const look = { "text-anchor": anchor, "font-size": 13, fill: color.muted };
        text(x + side, y + reach + 8, `node ${node}`, look);
        text(x + side, y + reach + 25, `${amountOf(out[node])} n out`, look);
      }
    }
    const everUsed = sent(steps, w, steps.length);
    for (let a = 0; a < w; a++)
      for (let b = 0; b < a; b++)
        if (everUsed[a][b] + everUsed[b][a]) link(a, b);
    for (const message of now) arrow(message);
    for (let rank = 0; rank < w; rank++) {
      const [x, y] = at(rank);
      svg("circle", { cx: x, cy: y, r: 17, fill: color.rank(rank) });
      text(x, y + 5, String(rank), { "text-anchor": "middle", fill: color.on, "font-weight": 600 });
    }

    function link(a, b) {
      const [[x1, y1], [x2, y2]] = [at(a), at(b)];
      const carried = Math.max(links[a][b], links[b][a]);
      svg("line", { x1, y1, x2, y2, stroke: color.line, "stroke-width": thickness(carried) });
    }

    function arrow({ from, to, begin, end }) {
      const [[x1, y1], [x2, y2]] = [at(from), at(to)];
      const far = Math.hypot(x2 - x1, y2 - y1);
      const [ux, uy] = [(x2 - x1) / far, (y2 - y1) / far];
      // Two that exchange get an arrow each, side by side.
      const both = now.some((one) => one.from === to && one.to === from);
      const [sx, sy] = both ? [-uy * 5, ux * 5] : [0, 0];
      svg("line", {
        x1: x1 + ux * 19 + sx, y1: y1 + uy * 19 + sy, x2: x2 - ux * 20 + sx, y2: y2 - uy * 20 + sy,
        stroke: color.network, "stroke-width": thickness(end - begin), "marker-end": "url(#the-ring-arrow)",
      });
    }
  }

  const thickness = (elements) => 1.8 + 2.6 * inUnits(elements);
  const amountOf = (elements) => inUnits(elements).toFixed(3).replace(/0$/, "");

  // One row per rank: what it holds, and what it has sent against the least possible.
  function drawTable(left, top, wide, state, steps, chunks, now, links, { svg, text, color }) {
    const { w, step } = state;
    const { sums, ranks } = held(steps, chunks, w, step);
    const cells = Math.min(wide - 150, 250);
    const begin = left + 22;
    const barAt = begin + cells + 18;
    const barRoom = left + wide - barAt - 46;
    const most = inUnits(busiest(sent(steps, w, steps.length)));
    const scale = barRoom / Math.max(most, limit(w));
    const small = { "font-size": 13, fill: color.muted };
    text(begin, top - 12, "what each rank holds", small);
    text(left + wide, top - 12, "sent, in n", { ...small, "text-anchor": "end" });
    const lowest = barAt + limit(w) * scale;
    for (let rank = 0; rank < w; rank++) {
      const y = top + rank * ROW;
      text(begin - 10, y + 19, String(rank), { "text-anchor": "middle", fill: color.rank(rank), "font-weight": 600 });
      chunks.forEach((chunk, i) => cell(chunk, y, sums[rank][i], ranks[rank][i], touched(rank, chunk)));
      const amount = inUnits(total(links[rank]));
      svg("rect", { x: barAt, y: y + 7, width: amount * scale, height: 14, fill: color.network });
      text(left + wide, y + 19, amountOf(total(links[rank])), { "font-size": 13, "text-anchor": "end" });
    }
    const bottom = top + w * ROW;
    svg("line", { x1: lowest, x2: lowest, y1: top - 2, y2: bottom, stroke: color.ink, "stroke-width": 1.5, "stroke-dasharray": "2 3" });
    const least = `least possible: 2(N−1)/N = ${amountOf(limit(w) * LENGTH)} n`;
    text(left + wide, bottom + 17, least, { "font-size": 13, "text-anchor": "end" });
    text(left + wide, bottom + 37, "N: number of ranks · n: size of the tensor", { ...small, "text-anchor": "end" });
    legend(bottom + 62);
    return bottom + 70;

    function legend(y) {
      const box = { y: y - 12, width: 16, height: 14, rx: 3 };
      svg("rect", { ...box, x: begin + 2, fill: color.soft, stroke: color.network, "stroke-width": 3 });
      text(begin + 26, y, "outlined: just received", { "font-size": 13 });
      svg("rect", { ...box, x: begin + 176, fill: color.done });
      text(begin + 198, y, "green: finished", { "font-size": 13 });
    }

    function touched(rank, { begin: from, end: to }) {
      return now.find((one) => one.to === rank && one.begin <= from && to <= one.end);
    }

    function cell({ begin: from, end: to }, y, sum, count, arrived) {
      const [x, size] = [begin + inUnits(from) * cells, inUnits(to - from) * cells];
      const whole = count === w;
      svg("rect", {
        x: x + 1, y, width: size - 2, height: 28, rx: 3, fill: whole ? color.done : color.soft,
        stroke: arrived ? color.network : whole ? color.done : color.line, "stroke-width": arrived ? 3 : 1,
      });
      text(x + size / 2, y + 19, String(sum), {
        "text-anchor": "middle", "font-size": size < 24 ? 12 : 14, fill: whole ? color.on : color.ink,
        "font-weight": whole ? 600 : 400,
      });
    }
  }

  // ---- playing --------------------------------------------------------------------------------

  let timer = null;

  function stop() {
    clearInterval(timer);
    timer = null;
  }

  // Not offered to those who asked for less motion: they step.
  function player(parent, state, change, { html, calm }) {
    const row = html("div", { class: "figure-controls", style: "gap: 0.4rem 0.6rem" }, parent);
    let latest = state;
    const go = (step) => {
      stop();
      change({ step });
      mark();
    };
    const back = html("button", { type: "button", text: "◀ Back", onclick: () => latest.step > 0 && go(latest.step - 1) }, row);
    const next = html("button", {
      type: "button", text: "Next step ▶",
      onclick: () => latest.step < stepsOf(latest).length && go(latest.step + 1),
    }, row);
    const playing = calm ? null : html("button", { type: "button", onclick: toggle }, row);

    function toggle() {
      if (timer) stop();
      else {
        change({ step: latest.step < stepsOf(latest).length ? latest.step + 1 : 0 });
        timer = setInterval(() => {
          if (!row.isConnected || latest.step >= stepsOf(latest).length) stop();
          else change({ step: latest.step + 1 });
          mark();
        }, SECONDS_PER_STEP * 1000);
      }
      mark();
    }

    function mark() {
      const all = stepsOf(latest).length;
      back.setAttribute("aria-disabled", String(latest.step === 0));
      next.setAttribute("aria-disabled", String(latest.step === all));
      if (playing) playing.textContent = timer ? "Pause" : "Play";
    }

    mark();
    return (now) => {
      latest = clean(now);
      mark();
    };
  }

  // ---- the sentences below --------------------------------------------------------------------

  const list = (items) => items.length === 1 ? items[0] : `${items.slice(0, -1).join(", ")} and ${items.at(-1)}`;

  function says(given) {
    const state = clean(given);
    const { w, step } = state;
    const steps = stepsOf(state);
    const sum = (w * (w + 1)) / 2;
    if (step === 0)
      return `Each element is ${w === 2 ? "1 on rank 0 and 2 on rank 1" : `1 on rank 0, 2 on rank 1, … ${w} on rank ${w - 1}`}. ` +
        `After ${steps.length} steps, every rank has the sum, ${sum}.`;
    return step < steps.length ? ofStep(state, steps) : ofAll(state, steps, sum);
  }

  function ofStep({ w, step }, steps) {
    const now = steps[step - 1];
    const biggest = amountOf(Math.max(...now.map(({ begin, end }) => end - begin)));
    const does = now[0].adds ? "adds what arrives to its own" : "keeps what arrives";
    const count = now.length === 1
      ? `one message of ${biggest} n`
      : `${now.length} messages at the same time, ${biggest} n each`;
    const top = busiest(sent(steps, w, step));
    return `Step ${step} of ${steps.length}: ${count}. The receiver ${does}. ` +
      `So far, the busiest rank has sent ${amountOf(top)} n.`;
  }

  function ofAll(state, steps, sum) {
    const { w } = state;
    const links = sent(steps, w, steps.length);
    const top = busiest(links);
    const who = links.flatMap((row, rank) => (total(row) === top ? [rank] : []));
    const busy = who.length === w
      ? `Each rank has sent ${amountOf(top)} n`
      : `The busiest, ${who.length > 1 ? "ranks" : "rank"} ${list(who)}, sent ${amountOf(top)} n`;
    const out = twoNodes(state)
      ? ` ${amountOf(Math.max(...leaving(links, perNode(w))))} n left a node; the least possible is 1.00 n.`
      : "";
    return `After ${steps.length} ${steps.length === 1 ? "step" : "steps"}, every rank has the sum, ${sum}. ` +
      `${busy}; with ${w} ranks, the least possible for the busiest is ${amountOf(limit(w) * LENGTH)} n.${out}`;
  }

  Figures.register({
    name: "the_ring",
    title: "All-reduce, step by step",
    tryThis: "Press “Next step” and follow one chunk until it is green. Then compare: which algorithm sends least, which takes fewest steps?",
    state: { way: "ring", w: 4, step: 0 },
    clean,
    controls: (state) => [
      { kind: "choice", key: "way", label: "Algorithm", options: Object.entries(NAMES) },
      {
        kind: "slider", key: "w", label: "Ranks", min: 2, max: 8, step: state.way === "hierarchical" ? 2 : 1,
        format: (w) => String(clean({ ...state, w }).w),
      },
      {
        kind: "slider", key: "step", label: "Step", min: 0, max: stepsOf(clean(state)).length, step: 1,
        format: (step) => String(clean({ ...state, step }).step),
      },
      { kind: "own", make: player },
    ],
    draw,
    says,
  });
})();
