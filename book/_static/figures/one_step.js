// One data-parallel step: drag samples, and see which mistakes miss the full batch's gradient.
(function () {
  "use strict";

  const { step, WEIGHTS, RATE } = FigureLogic.one_step;
  const START = {
    w: 2,
    samples: [[2, 5, -1, 2], [-2, 0, 1, 2], [3, 2, -3, 1], [0, 4, -2, 3]],
    divide: "own",
    factor: "1",
    combine: "average",
    through: "ddp",
    accumulate: "off",
    over_k: true,
    absent: "none",
  };
  // What a rank gets when a sample is added to it.
  const SPARE = [[1, 5, 2, 2], [0, 0, 2, 1], [2, 4, 0, 1], [1, 4, -1, 5]];
  const UNEQUAL = [[2, 5], [-2, 0, 1, 2, 0, 0], ...START.samples.slice(2)];
  const MOST = 4;
  // Samples lie in this square.
  const LEFT = -3;
  const EDGE = 6;
  const NARROW = 640; // px; below it, everything is one below the other
  const MARGIN = 14; // px around it, for samples on its border

  const PRESETS = [
    ["equal counts", {}],
    ["unequal counts", { samples: UNEQUAL }],
    ["divide by all", { samples: UNEQUAL, divide: "all" }],
    ["divide by all, × W", { samples: UNEQUAL, divide: "all", factor: "W" }],
    ["no division", { divide: "none" }],
    ["call .module", { through: "module" }],
    ["only no_sync", { accumulate: "never" }],
    ["rank without data", { w: 3, absent: "zeros" }],
  ].map(([name, part]) => [name, { ...START, ...part }]);

  // Without the minus sign of a zero.
  const signed = (value) => value.toFixed(2).replace(/^-0\.00$/, "0.00").replace("-", "−");
  const pair = ([a, b]) => `(${signed(a)}, ${signed(b)})`;

  // ---- what the state means, in words ----------------------------------------------------------

  const PLACES = {
    bypassed: ["puzzles/bypassed_wrapper.html", "Around the wrapper, nothing is averaged"],
    window: ["puzzles/mean_of_means.html#divided-twice", "Divided twice, or not at all"],
    summed: ["start/when_to_multiply.html#leaf-11", "case 11, with unequal counts"],
    join: ["surprises/in_the_data.html#uneven-inputs", "One rank has one more batch"],
    no_sync: ["puzzles/accumulate_vs_ddp.html", "Accumulation and DDP"],
  };

  const ROWS = {
    1: "own samples, divided by the own count, equal on all ranks",
    2: "own samples, divided by the own count, unequal",
    3: "own samples, divided by the global count",
    4: "own samples, not divided",
    10: "gradients are summed, the loss divides by the global count (or not at all)",
    11: "gradients are summed, the loss divides by the own count",
  };

  function place(state, now) {
    if (now.leaf) return null;
    if (state.through === "module") return PLACES.bypassed;
    if (state.accumulate === "never") return PLACES.no_sync;
    if (state.absent !== "none") return PLACES.join;
    if (state.accumulate === "each" && state.combine === "sum") return PLACES.no_sync;
    if (state.accumulate !== "off" && !state.over_k) return PLACES.window;
    return PLACES.summed;
  }

  function verdict(state, now) {
    if (!now.synchronized) return "replicas diverge";
    return { undefined: "no gradient", zero: "all zeros" }[now.kind[0]] ?? now.kind[0];
  }

  function says(state) {
    const now = step(state);
    const truth = `the full batch's gradient is ${pair(now.truth)}`;
    if (!now.synchronized)
      return (
        `Nothing is exchanged. Rank 0 steps with ${pair(now.final[0])}, rank ${state.w - 1} with ` +
        `${pair(now.final[state.w - 1])}; ${truth}. The replicas are no longer equal.`
      );
    const verb = state.combine === "sum" ? "summed" : "averaged";
    const means = {
      right: "Every rank takes the step of one process that has all samples.",
      "scale bug": "Only the length is wrong: one factor repairs it.",
      "direction bug": "The direction is wrong: no factor repairs it.",
      zero: "The gradient is zero.",
      undefined: "The full batch's gradient is zero, so there is nothing to compare.",
    }[now.kind[0]];
    return `The gradients are ${verb} to ${pair(now.final[0])}; ${truth}. ${means}`;
  }

  function code(state) {
    const factor = { 1: "", W: " * world_size", "1/W": " / world_size" }[state.factor];
    const many = state.accumulate !== "off";
    const over = many && state.divide === "own" && state.over_k ? " / 2" : "";
    const reduced = {
      own: `losses.mean()${over}`,
      all: "losses.sum() / samples_on_all_ranks",
      none: "losses.sum()",
    }[state.divide];
    const model = state.through === "ddp" ? "ddp" : "ddp.module";
    const lines = [`losses = (${model}(x) - y).square()`, `loss = ${reduced}${factor}`, "loss.backward()"];
    const body = (indent) => lines.map((line) => indent + line);
    let out = [];
    if (state.combine === "sum") out.push("ddp.register_comm_hook(None, total)  # a hook that sums");
    if (!many) out.push(...body(""));
    else {
      out.push(state.accumulate === "last" ? "for x, y, is_last in two_micro_batches:" : "for x, y in two_micro_batches:");
      if (state.accumulate === "each") out.push(...body("    "));
      else {
        const all = state.accumulate === "never";
        const last = "    with nullcontext() if is_last else ddp.no_sync():";
        out.push(all ? "    with ddp.no_sync():" : last);
        out.push(...body("        "));
      }
    }
    out.push("optimizer.step()");
    if (state.absent !== "none") {
      const divides = state.absent === "active" ? "divide_by_initial_world_size=False" : "";
      out = [`with ddp.join(${divides}):`, ...out.map((line) => `    ${line}`)];
    }
    return out.join("\n");
  }

  // ---- controls --------------------------------------------------------------------------------

  function counts(parent, state, change, tools) {
    const least = state.accumulate === "off" ? 1 : 2;
    const box = tools.html("div", { class: "figure-counts", role: "group", "aria-label": "Samples per rank" }, parent);
    tools.html("span", { class: "figure-label", text: "Samples" }, box);
    for (let rank = 0; rank < (state.absent === "none" ? state.w : state.w - 1); rank += 1) {
      const own = state.samples[rank];
      const count = own.length / 2;
      const set = (samples) => change({ samples: state.samples.map((each, r) => (r === rank ? samples : each)) });
      const stepper = tools.html("span", { class: "figure-stepper" }, box);
      const button = (text, label, possible, samples) =>
        tools.html("button", {
          type: "button", text, "aria-label": label, "data-focus": label,
          "aria-disabled": possible ? null : "true",
          onclick: () => possible && set(samples()),
        }, stepper);
      button("−", `One sample fewer on rank ${rank}`, count > least, () => own.slice(0, -2));
      const name = tools.html("span", { text: `rank ${rank}: ${count}` }, stepper);
      name.style.color = tools.color.rank(rank);
      button("+", `One sample more on rank ${rank}`, count < MOST, () => {
        const spare = SPARE[rank].slice(2 * (count % 2), 2 * (count % 2) + 2);
        return [...own, ...spare];
      });
    }
  }

  const controls = () => [
    { kind: "presets", label: "Try", options: PRESETS },
    { kind: "slider", key: "w", label: "Ranks (W)", min: 1, max: 4, step: 1 },
    { kind: "own", make: counts },
    {
      kind: "more",
      label: "More switches",
      controls: [
        {
          kind: "choice", key: "divide", label: "Each rank divides its summed loss by",
          options: [["own", "its own count"], ["all", "the global count"], ["none", "nothing"]],
        },
        { kind: "choice", key: "factor", label: "Multiply the loss by", options: [["1", "1"], ["W", "W"], ["1/W", "1/W"]] },
        { kind: "choice", key: "combine", label: "The ranks' gradients are", options: [["average", "averaged"], ["sum", "summed"]] },
        { kind: "choice", key: "through", label: "Forward calls", options: [["ddp", "ddp(x)"], ["module", "ddp.module(x)"]] },
        {
          kind: "choice", key: "accumulate", label: "Two micro-batches per rank", most: 3,
          options: [
            ["off", "no"],
            ["last", "yes, no_sync() except around the last"],
            ["each", "yes, without no_sync()"],
            ["never", "yes, no_sync() around both"],
          ],
        },
        { kind: "switch", key: "over_k", label: "Divide a micro-batch's mean by 2" },
        {
          kind: "choice", key: "absent", label: "The last rank", most: 2,
          options: [
            ["none", "has samples"],
            ["zeros", "has none: zeros, and an average over all W"],
            ["active", "has none: an average over the others"],
          ],
        },
      ],
    },
  ];

  // ---- drawing ---------------------------------------------------------------------------------

  // The nearest half, inside the square.
  const within = (value, least) => Math.min(least + EDGE, Math.max(least, Math.round(2 * value) / 2));

  function dataPanel(state, change, tools, x, y, size, tall) {
    const { color } = tools;
    const [unitX, unitY] = [(size - 2 * MARGIN) / EDGE, (tall - 2 * MARGIN) / EDGE];
    const at = ([sx, sy]) => [x + MARGIN + (sx - LEFT) * unitX, y + tall - MARGIN - sy * unitY];
    tools.text(x, y - 14, "Samples, and the model 0.5·x + 2", { "font-weight": 600 });
    tools.svg("rect", { x, y, width: size, height: tall, fill: color.soft });
    const grid = { stroke: color.line, "stroke-width": 0.5 };
    for (let tick = 0; tick <= EDGE; tick += 1) {
      const [tx, ty] = at([LEFT + tick, tick]);
      tools.svg("line", { x1: tx, x2: tx, y1: y, y2: y + tall, ...grid });
      tools.svg("line", { x1: x, x2: x + size, y1: ty, y2: ty, ...grid });
    }
    const loss = state.divide === "none" ? "sum of squared errors" : "mean squared error";
    tools.text(x, y + tall + 20, `Loss: ${loss} (dashed: errors)`, { "font-size": 13 });
    const line = (sx) => [sx, WEIGHTS[0] * sx + WEIGHTS[1]];
    const [x1, y1] = at(line(LEFT));
    const [x2, y2] = at(line(LEFT + EDGE));
    tools.svg("line", { x1, y1, x2, y2, stroke: color.ink, "stroke-width": 2 });
    for (let rank = 0; rank < state.w; rank += 1) {
      if (state.absent !== "none" && rank === state.w - 1) continue;
      const own = state.samples[rank];
      for (let i = 0; i < own.length / 2; i += 1) {
        const sample = own.slice(2 * i, 2 * i + 2);
        const [cx, cy] = at(sample);
        tools.svg("line", { x1: cx, x2: cx, y1: cy, y2: at(line(sample[0]))[1], stroke: color.rank(rank), "stroke-width": 1.5, "stroke-dasharray": "3 3" });
        const point = tools.svg("circle", {
          cx, cy, r: 9, fill: color.rank(rank), stroke: color.paper, "stroke-width": 2,
          tabindex: 0, role: "button", "data-focus": `sample-${rank}-${i}`,
          "aria-label": `Sample ${i} of rank ${rank}: x ${sample[0]}, y ${sample[1]}. Arrow keys move it.`,
        });
        const put = (sx, sy, now) => {
          const moved = [...now.samples[rank]];
          moved.splice(2 * i, 2, within(sx, LEFT), within(sy, 0));
          change({ samples: now.samples.map((each, r) => (r === rank ? moved : each)) });
        };
        tools.draggable(point, {
          move: (px, py, now) => put(LEFT + (px - x - MARGIN) / unitX, (y + tall - MARGIN - py) / unitY, now),
          nudge: (dx, dy, now) => {
            const [sx, sy] = now.samples[rank].slice(2 * i, 2 * i + 2);
            put(sx + dx / 2, sy - dy / 2, now);
          },
        });
        tools.text(cx, cy + 4, String(rank), { "text-anchor": "middle", "font-size": 11, fill: color.paper, "pointer-events": "none", "aria-hidden": "true" });
      }
    }
  }

  function arrow(tools, from, to, attributes) {
    const [dx, dy] = [to[0] - from[0], to[1] - from[1]];
    const long = Math.hypot(dx, dy);
    if (long < 1) return;
    const [ux, uy] = [dx / long, dy / long];
    const head = Math.min(9, long);
    const wide = attributes["stroke-width"] > 3 ? 6 : 4.5;
    const foot = [to[0] - head * ux, to[1] - head * uy];
    tools.svg("line", { x1: from[0], y1: from[1], x2: foot[0], y2: foot[1], ...attributes });
    const corners = [to, [foot[0] - wide * uy, foot[1] + wide * ux], [foot[0] + wide * uy, foot[1] - wide * ux]];
    tools.svg("polygon", { points: corners.map((each) => each.join(",")).join(" "), fill: attributes.stroke });
  }

  function arrowPanel(state, now, tools, x, y, size, tall) {
    const { color } = tools;
    const rule = state.combine === "sum" ? "sum" : "average";
    tools.text(x, y - 14, "Gradients: slope →, offset ↑", { "font-weight": 600 });
    tools.svg("rect", { x, y, width: size, height: tall, fill: color.soft });
    const vectors = [...now.local, ...now.final, now.truth];
    const extent = (i) => [Math.min(0, ...vectors.map((v) => v[i])), Math.max(0, ...vectors.map((v) => v[i]))];
    const [left, right] = extent(0);
    const [bottom, top] = extent(1);
    // One scale for both axes, so that angles are true.
    const unit = Math.min((size - 60) / Math.max(right - left, 1), (tall - 60) / Math.max(top - bottom, 1));
    const ox = x + (size - (right - left) * unit) / 2 - left * unit;
    const oy = y + (tall + (top - bottom) * unit) / 2 + bottom * unit;
    const at = ([a, b]) => [ox + a * unit, oy - b * unit];
    tools.svg("line", { x1: x, x2: x + size, y1: oy, y2: oy, stroke: color.line });
    tools.svg("line", { x1: ox, x2: ox, y1: y, y2: y + tall, stroke: color.line });
    const origin = at([0, 0]);
    now.local.forEach((own, rank) => {
      arrow(tools, origin, at(own), { stroke: color.rank(rank), "stroke-width": 2.5 });
    });
    if (now.synchronized) arrow(tools, origin, at(now.final[0]), { stroke: color.ink, "stroke-width": 4 });
    const [tx, ty] = at(now.truth);
    tools.svg("circle", { cx: tx, cy: ty, r: 11, fill: "none", stroke: color.ink, "stroke-width": 2 });
    // The legend, in rows of what fits.
    const entries = now.local.map((_, rank) => [`rank ${rank}`, color.rank(rank), 2.5]);
    if (now.synchronized) entries.push([rule, color.ink, 4]);
    entries.push(["full batch", null, 0]);
    let [lx, ly] = [x, y + tall + 20];
    for (const [name, stroke, width] of entries) {
      const wide = 26 + tools.textWidth(name, 13) + 14;
      if (lx + wide - 14 > x + size) [lx, ly] = [x, ly + 20];
      if (stroke) tools.svg("line", { x1: lx, x2: lx + 20, y1: ly - 4, y2: ly - 4, stroke, "stroke-width": width });
      else tools.svg("circle", { cx: lx + 10, cy: ly - 4, r: 6, fill: "none", stroke: color.ink, "stroke-width": 2 });
      tools.text(lx + 26, ly, name, { "font-size": 13 });
      lx += wide;
    }
    return ly;
  }

  function verdictRow(state, now, tools, y) {
    const { color, width } = tools;
    const good = now.synchronized && now.kind[0] === "right";
    const range = (values) => {
      const known = values.map((each) => (each === null ? NaN : each));
      const [low, high] = [Math.min(...known), Math.max(...known)];
      if (now.synchronized || tools.number(low) === tools.number(high)) return tools.number(known[0], 4);
      return `${tools.number(low)} to ${tools.number(high)}`;
    };
    const cells = [
      ["gradient length ÷ full batch's", range(now.ratio), color.ink],
      ["cosine with the full batch's gradient", range(now.cosine), color.ink],
      ["equals the full batch?", good ? "✓ yes" : "✗ no", good ? color.right : color.wrong],
    ];
    // Side by side, or one below the other.
    const narrow = width < NARROW;
    const [first, second] = cells.map(([name]) => tools.textWidth(name, 13));
    const gap = Math.max(16, (width - first - second - 180) / 2);
    const starts = [0, first + gap, first + second + 2 * gap];
    cells.forEach(([name, value, fill], index) => {
      const [x, top] = narrow ? [0, y + 50 * index] : [starts[index], y];
      tools.text(x, top, name, { "font-size": 13, fill: color.muted });
      tools.text(x, top + 24, value, { "font-size": 20, "font-weight": 600, fill });
      if (index === 2 && !good)
        tools.text(x + tools.textWidth(value, 20, 600) + 10, top + 23, verdict(state, now), { "font-size": 14, fill });
    });
    return y + (narrow ? 100 : 0) + 34;
  }

  function table(tools, parent, headers, rows, caption) {
    const wrap = tools.html("div", { class: "figure-table", tabindex: 0, role: "region", "aria-label": caption }, parent);
    const out = tools.html("table", {}, wrap);
    const head = tools.html("tr", {}, tools.html("thead", {}, out));
    for (const text of headers) tools.html("th", { scope: "col", text }, head);
    const body = tools.html("tbody", {}, out);
    for (const [name, fill, ...cells] of rows) {
      const row = tools.html("tr", {}, body);
      const first = tools.html("th", { scope: "row", text: name }, row);
      if (fill) first.style.color = fill;
      for (const text of cells) tools.html("td", { text }, row);
    }
  }

  function draw(svg, state, change, tools) {
    const now = step(state);
    const { width, color } = tools;
    const narrow = width < NARROW;
    const size = narrow ? width : (width - 40) / 2;
    const tall = narrow ? 0.72 * size : 0.8 * size;
    const top = verdictRow(state, now, tools, 16) + 42;
    dataPanel(state, change, tools, 0, top, size, tall);
    const y = narrow ? top + tall + 62 : top;
    tools.height(arrowPanel(state, now, tools, narrow ? 0 : size + 40, y, size, tall) + 8);

    const line = tools.html("p", {}, tools.after);
    const where = place(state, now);
    const [address, text] = where ?? [`start/when_to_multiply.html#leaf-${now.leaf}`, `case ${now.leaf}: ${ROWS[now.leaf]}`];
    line.append(where ? "Explained in " : "In “When do I multiply?”, this is ");
    tools.html("a", { href: tools.page(address), text }, line);
    line.append(".");

    const fold = tools.fold("The code, the numbers, and what SGD and Adam do with them");
    tools.html("pre", { class: "figure-code", tabindex: 0, "aria-label": "The step's code", text: code(state) }, fold);
    table(
      tools,
      fold,
      ["gradient of", "own", "after backward"],
      [
        ...now.local.map((own, r) => [`rank ${r}`, color.rank(r), pair(own), pair(now.final[r])]),
        ["full batch", null, "", pair(now.truth)],
      ],
      "Gradients in numbers",
    );
    const moved = (weights) => pair(weights.map((each, i) => (each - WEIGHTS[i]) / RATE));
    table(
      tools,
      fold,
      ["first update ÷ lr", "rank 0", "full batch"],
      [
        ["SGD", null, moved(now.sgd[0]), moved(now.sgd_truth)],
        ["Adam", null, moved(now.adam[0]), moved(now.adam_truth)],
      ],
      "First updates of SGD and Adam",
    );
  }

  Figures.register({
    name: "one_step",
    title: "One step, live",
    tryThis: "Press “unequal counts”: the average of the ranks misses the circle, the full batch's gradient. Or drag a sample.",
    interactive: true,
    state: START,
    clean(state) {
      const least = state.accumulate === "off" ? 1 : 2;
      const fits = (own) =>
        Array.isArray(own) && own.length % 2 === 0 && own.length >= 2 * least && own.length <= 2 * MOST;
      const samples = START.samples.map((usual, rank) => {
        const own = state.samples[rank];
        return fits(own) ? own.map((each, i) => within(each, i % 2 ? 0 : LEFT)) : usual;
      });
      return { ...state, samples, absent: state.w === 1 ? "none" : state.absent };
    },
    controls,
    draw,
    says,
  });
})();
