// Memory and traffic: what each rank keeps and sends, one row per strategy.
(function () {
  "use strict";

  const logic = FigureLogic.memory_and_traffic;

  const NAMES = {
    ddp: "DDP",
    zero1: "ZeRO-1",
    zero2: "ZeRO-2",
    fsdp: "Fully sharded",
    hsdp: "Hybrid sharded",
    local: "Local updates",
  };
  const KEPT = [
    ["weights", "weights", "rank0"],
    ["gradients", "gradients", "rank1"],
    ["buckets", "gradients in buckets", "rank5"],
    ["master", "fp32 master weights", "rank4"],
    ["optimizer", "optimizer state", "rank2"],
  ];
  const SENT = [
    ["gradients", "gradients", "rank1"],
    ["weights", "weights", "rank0"],
    ["across", "to other shard groups", "rank3"],
  ];
  const OPTIMIZERS = { sgd: "SGD", momentum: "SGD + momentum", adam: "Adam" };

  const powers = (last) => Array.from({ length: last + 1 }, (_, exponent) => 2 ** exponent);

  // Three significant digits, so that large and small jobs read alike.
  function bytes(value) {
    const units = ["B", "kB", "MB", "GB", "TB", "PB"];
    let place = 0;
    while (value >= 999.5 && place < units.length - 1) {
      value /= 1000;
      place += 1;
    }
    const digits = place === 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
    return `${value.toFixed(digits)} ${units[place]}`;
  }

  function count(value, [trillion, billion, million] = [" trillion", " billion", " million"]) {
    if (value >= 1e12) return `${value / 1e12}${trillion}`;
    return value >= 1e9 ? `${value / 1e9}${billion}` : `${value / 1e6}${million}`;
  }

  function jobOf(state) {
    return {
      parameters: state.parameters,
      ranks: state.w,
      precision: state.precision,
      optimizer: state.optimizer,
      bucketViews: state.views,
      freeWeights: state.free,
      shardRanks: Math.min(state.group, state.w),
      every: state.every,
    };
  }

  function whatIsSplit(job, strategy) {
    const split = logic.splits(strategy);
    const ranks = logic.sharedBy(job, strategy);
    const names = [
      ["weights", split.weights],
      ["gradients", split.gradients],
      ["optimizer state", split.optimizer && job.optimizer !== "sgd"],
    ];
    if (job.precision === "bf16") names.push(["master weights", split.optimizer]);
    const list = names.filter(([, isSplit]) => isSplit).map(([name]) => name);
    if (!list.length) return "Nothing is split: every rank keeps everything.";
    const last = list.pop();
    const before = list.length > 1 ? `${list.join(", ")}, and ` : list.map((one) => `${one} and `).join("");
    return `Split over ${ranks} ${ranks === 1 ? "rank" : "ranks"}: ${before}${last}.`;
  }

  const SENDS = {
    ddp: () => "an all-reduce of the gradients",
    zero1: () => "a reduce-scatter of the gradients and an all-gather of the weights",
    zero2: () => "a reduce-scatter of the gradients and an all-gather of the weights",
    fsdp: (job) =>
      `a reduce-scatter of the gradients and ${job.freeWeights ? "two all-gathers" : "an all-gather"} of the weights`,
    hsdp: (job) => `${SENDS.fsdp(job)} in its group, and an all-reduce of its shard across groups`,
    local: (job) => `an all-reduce of the weights every ${job.every} steps`,
  };

  // One bar of stacked parts.
  function bar(tools, parts, kinds, { x, y, height, scale }) {
    for (const [key, , color] of kinds) {
      const width = parts[key] * scale;
      if (width > 0) {
        tools.svg("rect", { x, y, width, height, fill: tools.color[color] });
        x += width;
      }
    }
  }

  function legend(tools, kinds, y, shown) {
    let x = 0;
    for (const [key, name, color] of kinds) {
      if (!shown(key)) continue;
      const wide = 18 + tools.textWidth(name, 13) + 18;
      if (x + wide > tools.width + 18) {
        x = 0;
        y += 20;
      }
      tools.svg("rect", { x, y: y - 10, width: 12, height: 12, fill: tools.color[color] });
      tools.text(x + 18, y, name, { "font-size": 13 });
      x += wide;
    }
    return y;
  }

  // The setting of a row, which its name shows; most rows have none.
  function settingOf(job, strategy) {
    if (strategy === "hsdp") return `(groups of ${job.shardRanks})`;
    if (strategy !== "local") return "";
    return job.every === 1 ? "(every step)" : `(every ${job.every} steps)`;
  }

  // A row's name, to the left of its bars, or above them where there is no room.
  function drawName(tools, job, strategy, y, { wide, chosen, halo }) {
    const setting = settingOf(job, strategy);
    const look = { "font-weight": chosen ? 700 : 400, ...halo };
    if (wide) {
      tools.text(0, y + (setting ? 17 : 24), NAMES[strategy], look);
      tools.text(0, y + 32, setting, { "font-size": 13 });
    } else tools.text(0, y + 17, `${NAMES[strategy]} ${setting}`.trim(), look);
  }

  // The line where the device's memory ends, from its label on top.
  function drawDevice(tools, state, { x, y, bottom, edge, right }) {
    const text = edge === null ? `a device of ${state.device} GB holds each of them` : `device: ${state.device} GB`;
    const size = tools.textWidth(text, 13);
    const at = edge === null ? x : Math.max(x, Math.min(edge - size / 2, right - size));
    const color = edge === null ? tools.color.muted : tools.color.wrong;
    tools.text(at, y, text, { "font-size": 13, fill: color });
    if (edge !== null)
      tools.svg("line", { x1: edge, x2: edge, y1: y + 5, y2: bottom, stroke: color, "stroke-width": 2 });
  }

  function draw(svg, state, change, tools) {
    const job = jobOf(state);
    const rows = logic.compare(job);
    const device = state.device * 1e9;
    const wide = tools.width >= 560;
    const gutter = wide ? 138 : 0;
    const gap = 28;
    const amount = 64; // room for a number to the right of the longest bar
    const panel = wide ? (tools.width - gutter - gap) / 2 : tools.width;
    // Both scales stay as they are while the ranks change.
    const alone = logic.compare({ ...job, ranks: 1, shardRanks: 1 });
    const most = Math.max(...[...alone, ...rows].map((row) => row.memory.total));
    const limit = 3 * logic.memory({ ...job, bucketViews: true }, "ddp").weights;
    const mostSent = Math.max(limit, ...rows.map((row) => row.traffic.total));

    // Two blocks: side by side with shared names, or one below the other.
    const height = wide ? 40 : 48;
    const kept = { x: gutter, y: 16, top: 46, scale: (panel - amount) / most };
    const below = kept.top + rows.length * height;
    const sent = wide
      ? { ...kept, x: gutter + panel + gap }
      : { x: 0, y: below + 28, top: below + 36 };
    sent.scale = (panel - amount) / mostSent;
    const bottom = sent.top + rows.length * height;
    const named = wide ? [kept] : [kept, sent]; // the blocks with names
    for (const { top } of named) {
      const y = top + logic.STRATEGIES.indexOf(state.strategy) * height;
      tools.svg("rect", { x: -6, y, width: tools.width + 12, height, rx: 4, fill: tools.color.soft });
    }
    const [inset, thick] = wide ? [11, 18] : [25, 14]; // a bar's place in its row
    rows.forEach(({ memory, traffic }, row) => {
      const y = row * height + inset;
      bar(tools, memory, KEPT, { ...kept, y: kept.top + y, height: thick });
      bar(tools, traffic, SENT, { ...sent, y: sent.top + y, height: thick });
    });
    const edge = device <= most ? kept.x + device * kept.scale : null;
    drawDevice(tools, state, { x: kept.x, y: 36, bottom: below, edge, right: kept.x + panel });
    rows.forEach(({ strategy, memory, traffic }, row) => {
      const chosen = strategy === state.strategy;
      const halo = { stroke: tools.color[chosen ? "soft" : "paper"], "stroke-width": 4, "paint-order": "stroke" };
      for (const { top } of named)
        drawName(tools, job, strategy, top + row * height, { wide, chosen, halo });
      const number = ({ x, top, scale }, { total }, look) => {
        const y = top + row * height + inset + thick - 4;
        tools.text(x + total * scale + 6, y, bytes(total), { "font-size": 13, ...halo, ...look });
      };
      const tooLarge = { fill: tools.color.wrong, "font-weight": 600 };
      number(kept, memory, memory.total <= device ? {} : tooLarge);
      number(sent, traffic, {});
    });
    tools.text(kept.x, kept.y, "Each rank keeps", { "font-weight": 600 });
    tools.text(sent.x, sent.y, "Each rank sends per step", { "font-weight": 600 });

    let y = bottom + 28;
    const isKept = (key) => rows.some((row) => row.memory[key] > 0);
    y = legend(tools, [...KEPT, SENT[2]], y, (key) => isKept(key) || (key === "across" && rows[4].traffic.across > 0));
    y += 28;
    tools.svg("line", { x1: 0, x2: tools.width, y1: y - 18, y2: y - 18, stroke: tools.color.line });
    const rule =
      "The rule: what is split over n ranks takes 1/n of its bytes on each. To reduce-scatter or to " +
      "all-gather b bytes, each rank sends b·(n−1)/n; an all-reduce is one of each.";
    y = tools.paragraph(0, y, rule, tools.width, { "font-size": 13, fill: tools.color.muted });
    tools.height(y);
  }

  function says(state) {
    const job = jobOf(state);
    const kept = logic.memory(job, state.strategy);
    const sent = logic.traffic(job, state.strategy);
    const fits = kept.total <= state.device * 1e9 ? "fits" : "does not fit";
    return (
      `${NAMES[state.strategy]}, ${count(job.parameters)} parameters, ${job.ranks} ` +
      `${job.ranks === 1 ? "rank" : "ranks"}: each rank keeps ${bytes(kept.total)}, which ${fits} into ` +
      `${state.device} GB. ${whatIsSplit(job, state.strategy)} ` +
      (job.ranks === 1
        ? "One rank sends nothing."
        : `Each rank sends ${bytes(sent.total)} per step: ${SENDS[state.strategy](job)}.`)
    );
  }

  Figures.register({
    name: "memory_and_traffic",
    title: "Memory and traffic",
    tryThis:
      "Drag the number of ranks: sharding shrinks what a rank keeps; no sharded plan sends less than DDP.",
    state: {
      strategy: "zero2",
      parameters: 7.5e9,
      w: 64,
      precision: "bf16",
      optimizer: "adam",
      device: 80,
      group: 8,
      every: 16,
      views: true,
      free: true,
    },
    controls: [
      { kind: "slider", key: "w", label: "Ranks", values: powers(14), format: (w) => w.toLocaleString("en-US") },
      {
        kind: "slider", key: "parameters", label: "Parameters", format: (n) => count(n, ["T", "B", "M"]),
        values: [1e8, 3.5e8, 1e9, 3e9, 7.5e9, 13e9, 30e9, 70e9, 175e9, 400e9, 1e12],
      },
      { kind: "choice", key: "strategy", label: "Explain", most: 3, options: Object.entries(NAMES) },
      {
        kind: "choice", key: "precision", label: "Numbers",
        options: [["fp32", "fp32"], ["bf16", "bf16, fp32 master"]],
      },
      { kind: "choice", key: "optimizer", label: "Optimizer", options: Object.entries(OPTIMIZERS) },
      {
        kind: "more",
        label: "More choices",
        controls: [
          { kind: "slider", key: "device", label: "Device memory", values: [16, 24, 32, 40, 80, 96, 141, 192, 288], unit: "GB" },
          { kind: "slider", key: "group", label: "Shard group", values: powers(10), unit: "ranks" },
          { kind: "slider", key: "every", label: "Local: average every", values: [1, 2, 4, 8, 16, 32, 64, 128, 256, 500], unit: "steps" },
          { kind: "switch", key: "views", label: "DDP: gradients are views of buckets" },
          { kind: "switch", key: "free", label: "Sharded: free the weights after forward" },
        ],
      },
    ],
    draw,
    says,
  });
})();
