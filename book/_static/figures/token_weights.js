// The weight of a token under four means: drag completions' ends, or drag them to other cells.
(function () {
  "use strict";

  const { LONGEST, weights } = FigureLogic.token_weights;
  const COMPLETIONS = 8;
  const MEANS = [
    ["token", "tokens (SFT, DAPO)"],
    ["sequence", "sequences (GRPO, GSPO)"],
    ["prompt", "prompts"],
    ["constant", "a constant (Dr. GRPO)"],
  ];
  const [ROW, HEAD, TALL] = [30, 24, 24]; // px: a completion, a cell's name, the highest weight

  const inOrder = (parts) =>
    Array.from({ length: COMPLETIONS }, (_, i) => Math.floor((i * parts) / COMPLETIONS));
  const deal = (w, k) => [`${w} × ${k}`, { w, k, cells: inOrder(w * k) }];
  const DEALS = [deal(1, 1), deal(1, 2), deal(2, 1), deal(2, 2)];

  const right = ({ found, right }) => Math.abs(found / right - 1) < 1e-9;
  const nameOf = (cell, { k }) => `rank ${Math.floor(cell / k)}, micro-batch ${cell % k}`;
  const tokens = (n) => (n === 1 ? "1 token" : `${n} tokens`);

  function clean(state) {
    const whole = (value, low, high) => Math.min(high, Math.max(low, Math.round(value) || low));
    const fixed = (list, low, high) =>
      Array.from({ length: COMPLETIONS }, (_, i) => whole(list[i], low, high));
    const [w, k] = [whole(state.w, 1, 2), whole(state.k, 1, 2)];
    return { ...state, w, k, lengths: fixed(state.lengths, 1, LONGEST), cells: fixed(state.cells, 0, w * k - 1) };
  }

  function says(state) {
    const all = weights(state);
    const factor = (i) => all[i].found / all[i].right;
    const off = (i) => Math.abs(Math.log(factor(i)));
    const worst = all.map((_, i) => i).reduce((a, b) => (off(b) > off(a) ? b : a));
    if (right(all[worst])) return "Every token has the weight that it has in one process with all completions.";
    const where = `${tokens(state.lengths[worst])}, ${nameOf(state.cells[worst], state)}`;
    return `A token of completion ${worst + 1} (${where}) has ${factor(worst).toFixed(2)} times its right weight.`;
  }

  // Where cells and completions are, from top to bottom.
  function places({ cells, w, k }) {
    const [heads, rows] = [[], []];
    let y = 4;
    for (let cell = 0; cell < w * k; cell += 1) {
      heads.push(y);
      y += HEAD;
      cells.forEach((each, i) => {
        if (each !== cell) return;
        rows[i] = y;
        y += ROW;
      });
      y += 8;
    }
    return { heads, rows, bottom: y };
  }

  function draw(svg, state, change, tools) {
    const { color, width } = tools;
    const unit = Math.min(38, (width - 150) / LONGEST); // px per token
    const all = weights(state);
    const { heads, rows, bottom } = places(state);
    const highest = Math.max(...all.flatMap(({ found, right }) => [found, right]));
    const high = (weight) => Math.max(2, (weight / highest) * TALL);
    const replaced = (list, i, value) => list.map((each, j) => (j === i ? value : each));

    heads.forEach((y, cell) => {
      tools.text(0, y + 16, nameOf(cell, state), { "font-size": 13, "font-weight": 600 });
      tools.svg("line", { x1: 0, x2: width, y1: y, y2: y, stroke: color.line });
    });
    state.lengths.forEach((n, i) => {
      const { found, right: wanted } = all[i];
      const base = rows[i] + TALL + 3;
      const fill = right(all[i]) ? color.right : color.wrong;
      const bar = tools.svg("g", {
        tabindex: 0, role: "slider", "data-focus": `completion ${i}`,
        "aria-label": `Completion ${i + 1}: up and down move it to another micro-batch`,
        "aria-valuemin": 1, "aria-valuemax": LONGEST, "aria-valuenow": n,
        "aria-valuetext": `${tokens(n)}, ${nameOf(state.cells[i], state)}`,
      });
      const wide = n * unit;
      tools.svg("rect", { x: 0, y: base - TALL, width: Math.max(24, wide), height: TALL, fill: "transparent" }, bar);
      tools.svg("rect", { x: 0, y: base - high(found), width: wide, height: high(found), fill, "fill-opacity": 0.55 }, bar);
      tools.svg("rect", {
        x: 0, y: base - high(wanted), width: wide, height: high(wanted),
        fill: "none", stroke: color.ink, "stroke-width": 1.5,
      }, bar);
      tools.text(LONGEST * unit + 8, base - 7, `${tokens(n)}: ${found.toFixed(3)}`, { "font-size": 13 });
      tools.draggable(bar, {
        move: (x, y, now) => {
          const { heads: tops } = places(now);
          const cell = Math.max(0, tops.findLastIndex((top) => y >= top));
          const lengths = replaced(now.lengths, i, Math.round(x / unit));
          change({ lengths, cells: replaced(now.cells, i, cell) });
        },
        nudge: (dx, dy, now) =>
          change({
            lengths: replaced(now.lengths, i, now.lengths[i] + dx),
            cells: replaced(now.cells, i, now.cells[i] + dy),
          }),
      });
    });
    const note = "width: tokens; height: weight of a token; outline: its right weight";
    tools.height(tools.paragraph(0, bottom + 14, note, width, { "font-size": 13, fill: color.muted }));
  }

  Figures.register({
    name: "token_weights",
    title: "What a token weighs",
    tryThis: "Drag a completion's end to change its length, or drag it to another micro-batch.",
    interactive: true,
    state: { mean: "token", by: "micro", w: 2, k: 2, lengths: [2, 12, 4, 6, 2, 3, 9, 12], cells: inOrder(4) },
    controls: [
      { kind: "choice", key: "mean", label: "Mean over", options: MEANS },
      {
        kind: "choice", key: "by", label: "Divided by the count of",
        options: [["micro", "its micro-batch, and by K"], ["rank", "its rank"], ["all", "all ranks, over W"]],
      },
      { kind: "presets", label: "Ranks × micro-batches", options: DEALS },
    ],
    clean,
    draw,
    says,
  });
})();
