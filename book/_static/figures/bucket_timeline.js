// The bucket timeline: what computes, what is sent, and what the step waits for.
(function () {
  "use strict";

  const logic = FigureLogic.bucket_timeline;

  const MODELS = [
    ["stack", "six linear layers, 6 MiB"],
    ["transformer", "transformer, 24 MiB"],
    ["assumed", "transformer, 80 + 160 ms assumed"],
  ];
  // Where a step was recorded: two ranks, 1 Gbit/s, 50 µs.
  const RECORDED = { w: 2, gbit: 1, latency: 50, speed: 1 };
  const TRIED = {
    stack: [1, 2],
    transformer: [1, 4, 16],
    assumed: [1, 4],
  };
  const OWN_CAP = 0; // a first cap of this value: the first bucket takes the cap of all
  const PALE = 0.45; // opacity of what was recorded

  // All times of one drawing have one unit, which follows from the longest.
  const unitOf = (longest) => (longest < 10 ? ["ms", 1e-3] : ["s", 1]);
  const cap = (value) => `${value} MiB`;

  function choicesOf(state) {
    return { ...state, first: state.first === OWN_CAP ? null : state.first };
  }

  function presetsOf(model) {
    const tried = TRIED[model].map((mib) => [
      `${mib} MiB`,
      { ...RECORDED, cap: mib, first: OWN_CAP, overlap: true },
    ]);
    return [
      ["after backward", { ...RECORDED, overlap: false }],
      ["torch's caps: 1, then 25 MiB", { ...RECORDED, cap: 25, first: 1, overlap: true }],
      ...tried,
    ];
  }

  function controls(state) {
    return [
      {
        kind: "presets",
        label: state.model === "assumed" ? "Try" : "Measured steps",
        options: presetsOf(state.model),
      },
      { kind: "slider", key: "cap", label: "Bucket cap", values: [0, 0.25, 0.5, 1, 2, 4, 8, 16, 25, 32], format: cap },
      { kind: "slider", key: "gbit", label: "Bandwidth", values: [0.5, 1, 2, 5, 10, 25, 50, 100, 200, 400], unit: "Gbit/s" },
      { kind: "slider", key: "w", label: "Ranks", values: [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024] },
      {
        kind: "more",
        label: "More choices",
        controls: [
          { kind: "choice", key: "model", label: "Model", most: 2, options: MODELS },
          {
            kind: "slider", key: "first", label: "First cap", values: [OWN_CAP, 0.25, 0.5, 1, 2, 4],
            format: (value) => (value === OWN_CAP ? "same" : `${value} MiB`),
          },
          { kind: "slider", key: "latency", label: "Latency", values: [0, 5, 10, 20, 50, 100, 200, 500, 1000], unit: "µs" },
          { kind: "slider", key: "speed", label: "Backward, speed", values: [0.25, 0.5, 1, 2, 4, 8], format: (value) => `${value} ×` },
          { kind: "switch", key: "overlap", label: "Send during backward" },
        ],
      },
    ];
  }

  // The end of the axis: a round number, so that the scale seldom changes.
  function roundedUp(value) {
    const power = 10 ** Math.floor(Math.log10(value));
    return power * [1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value);
  }

  function everythingOf(state) {
    const backward = logic.backwardOf(state.model);
    const predicted = logic.predict(backward, choicesOf(state));
    const recorded = logic.recorded(state.model, choicesOf(state));
    const longest = Math.max(predicted.step.end, predicted.flat, recorded?.end ?? 0);
    return { ...predicted, recorded, longest };
  }

  function size(bytes) {
    return bytes >= 0.095 * logic.MIB
      ? `${(bytes / logic.MIB).toFixed(1)} MiB`
      : `${Math.round(bytes / 1024)} KiB`;
  }

  // A lane of work: the forward, then each bucket's part of the backward in the bucket's color.
  function drawComputing(tools, scale, { y, height, forward, ready, buckets, pale }) {
    const { color } = tools;
    tools.svg("rect", { x: 0, y, width: scale(forward), height, fill: color.line });
    if (scale(forward) > tools.textWidth("forward", 13) + 8)
      tools.text(scale(forward) / 2, y + height / 2 + 5, "forward", { "font-size": 13, "text-anchor": "middle" });
    const owner = new Map(buckets.flatMap((bucket, number) => bucket.map((place) => [place, number])));
    let before = forward;
    ready.forEach((moment, place) => {
      const fill = color.rank(owner.get(place) % 4);
      const width = Math.max(0, scale(moment) - scale(before));
      tools.svg("rect", { x: scale(before), y, width, height, fill, opacity: pale ? PALE : 1 });
      before = moment;
    });
    const [begin, end] = [scale(forward), scale(before)];
    // On a plate of its own: no text color can be read on all the buckets' colors, unless these are pale.
    const wide = tools.textWidth("backward", 13) + 12;
    if (end - begin < wide) return;
    const [x, middle] = [(begin + end) / 2, y + height / 2];
    if (!pale)
      tools.svg("rect", { x: x - wide / 2, y: middle - 10, width: wide, height: 20, rx: 4, fill: color.paper });
    tools.text(x, middle + 5, "backward", { "font-size": 13, "text-anchor": "middle", fill: color.ink });
  }

  function drawMessages(tools, scale, { y, height, messages, pale }) {
    messages.forEach(({ begun, done, bytes }, number) => {
      const width = Math.max(1, scale(done) - scale(begun));
      const fill = tools.color.rank(number % 4);
      tools.svg("rect", {
        x: scale(begun), y, width, height, fill, opacity: pale ? PALE : 1,
        stroke: tools.color.paper, "stroke-width": width > 3 ? 1 : 0,
      });
      const label = [size(bytes), String(number)].find(
        (text) => tools.textWidth(text, 12) + 6 < width,
      );
      if (label && !pale)
        tools.text(scale(begun) + width / 2, y + height / 2 + 4, label, {
          "font-size": 12, "text-anchor": "middle", fill: tools.color.on,
        });
    });
  }

  function draw(svg, state, change, tools) {
    const { color } = tools;
    const { compute, plan, step, critical, limit, flat, recorded, longest } = everythingOf(state);
    const last = roundedUp(longest);
    const scale = (seconds) => (tools.width * seconds) / last;
    const small = { "font-size": 13 };
    const [unit, per] = unitOf(last);
    const time = (seconds) => `${tools.number(seconds / per, 1)} ${unit}`;

    // Computing, and the network below it.
    let y = 14;
    tools.text(0, y, "Computing", { "font-weight": 600 });
    const path = tools.width - tools.textWidth("critical path", 13);
    tools.svg("rect", { x: path - 26, y: y - 6, width: 18, height: 4, fill: color.ink });
    tools.text(path, y, "critical path", small);
    const computing = { y: y + 12, height: 30 };
    y = computing.y + computing.height + 44;
    const network = { y, height: 30 };
    const bottom = network.y + network.height;

    // The end of backward, behind everything else.
    const waits = step.end - step.computeEnd;
    const edge = scale(step.computeEnd);
    tools.svg("line", {
      x1: edge, x2: edge, y1: computing.y - 4, y2: bottom + 22,
      stroke: color.wrong, "stroke-width": 1.5, "stroke-dasharray": "4 3",
    });
    drawComputing(tools, scale, { ...computing, forward: compute.forward, ready: compute.ready, buckets: plan });

    // From the moment a bucket is full to the moment the network is free for it.
    if (plan.length <= 24)
      step.sent.forEach(({ launched, begun }, number) => {
        tools.svg("path", {
          d: `M${scale(launched)} ${computing.y + computing.height}L${scale(begun)} ${network.y}`,
          stroke: color.rank(number % 4), "stroke-width": 1.5, fill: "none",
        });
      });
    drawMessages(tools, scale, { ...network, messages: step.sent });
    const halo = { stroke: color.paper, "stroke-width": 5, "paint-order": "stroke" };
    tools.text(0, network.y - 10, "Network", { "font-weight": 600, ...halo });

    // The critical path, along the lower edge of what it consists of.
    const turn = step.sent[critical];
    const [low, lower] = [computing.y + computing.height + 3, bottom + 3];
    tools.svg("path", {
      d: `M0 ${low}H${scale(turn.launched)}`,
      stroke: color.ink, "stroke-width": 4, fill: "none",
    });
    tools.svg("path", {
      d: `M${scale(turn.begun)} ${lower}H${scale(step.end)}`,
      stroke: color.ink, "stroke-width": 4, fill: "none",
    });

    // What the step waits for after backward.
    tools.svg("rect", { x: edge, y: bottom + 9, width: scale(waits), height: 7, fill: color.wrong });
    const waiting = `waits ${time(waits)}`;
    const wide = tools.textWidth(waiting, 13);
    const at = Math.min(edge + 4, tools.width - wide);
    tools.text(at, bottom + 32, waiting, { ...small, fill: color.wrong });
    y = bottom + 56;

    if (recorded?.sent.length) {
      const way = state.overlap ? "torch's DDP" : "one message after backward";
      tools.text(0, y, `Recorded: ${way}`, { "font-weight": 600 });
      drawComputing(tools, scale, { y: y + 9, height: 14, forward: recorded.forward, ready: recorded.ready, buckets: plan, pale: true });
      drawMessages(tools, scale, { y: y + 27, height: 14, messages: recorded.sent, pale: true });
      y += 66;
    }

    // The step's time against the two others.
    tools.text(0, y, "Time of the step", { "font-weight": 600 });
    const rows = [
      [["this plan"], step.end, color.accent],
      ...(recorded ? [[[recorded.predicted ? "recorded" : "measured"], recorded.end, color.muted]] : []),
      [["one message after backward", "one message"], flat, color.muted],
      [["lower limit of any plan", "lower limit"], limit, color.right],
    ];
    y += 10;
    for (const [names, seconds, fill] of rows) {
      const end = scale(seconds);
      tools.svg("rect", { x: 0, y, width: end, height: 20, fill });
      const texts = names.map((name) => `${name}: ${time(seconds)}`);
      const room = Math.max(end, tools.width - end) - 12; // in the bar, or to the right of it
      const text = texts.find((one) => tools.textWidth(one, 13) <= room) ?? texts.at(-1);
      const inside = tools.textWidth(text, 13) <= end - 12;
      tools.text(inside ? 6 : end + 6, y + 15, text, { ...small, fill: inside ? color.on : color.ink });
      y += 26;
    }
    drawAxis(tools, scale, last, y + 4);
    const rule = "The rule: a bucket is sent once all its gradients are ready and the network is free.";
    y = tools.paragraph(0, y + 46, rule, tools.width, { ...small, fill: color.muted });
    tools.height(y);
  }

  function drawAxis(tools, scale, last, y) {
    const [unit, per] = unitOf(last);
    const whole = last / per;
    const power = 10 ** Math.floor(Math.log10(whole));
    const step = power * [0.2, 0.25, 0.5, 1, 2, 2.5].find((one) => whole / (one * power) <= 6);
    for (let tick = 0; tick <= whole * (1 + 1e-9); tick += step) {
      const x = scale(tick * per);
      tools.svg("line", { x1: x, x2: x, y1: y - 4, y2: y + 1, stroke: tools.color.muted });
      const anchor = tick === 0 ? "start" : x > tools.width - 20 ? "end" : "middle";
      const text = tick === 0 ? `0 ${unit}` : tools.number(tick, step < 1 ? 2 : 0);
      tools.text(x, y + 15, text, { "font-size": 12, fill: tools.color.muted, "text-anchor": anchor });
    }
    tools.svg("line", { x1: 0, x2: tools.width, y1: y - 4, y2: y - 4, stroke: tools.color.line });
  }

  // What would make this step shorter.
  function advice({ step, critical, exposed, plan, latencyShare }, state) {
    if (exposed < 0.02 * step.end) return "Backward hides nearly everything: a faster network gains nothing.";
    if (!state.overlap) return "Everything is sent after backward, so nothing hides it.";
    if (latencyShare > 0.5)
      return "Most of the network's time is latency, so fewer messages, from larger buckets, would help.";
    if (plan.length === 1) return "There is one bucket, so it can start only when backward ends.";
    if (critical === 0) return "Once it has begun, the network never rests: begin earlier, with a smaller first bucket, or send less.";
    if (critical === plan.length - 1) return "The last bucket is launched when backward ends, and the step waits for it.";
    return `From bucket ${critical} on, the network never rests.`;
  }

  function says(state) {
    const all = everythingOf(state);
    const { step, limit, flat, recorded, plan } = all;
    const [unit, per] = unitOf(all.longest);
    const time = (seconds) => `${(seconds / per).toFixed(1)} ${unit}`;
    const buckets = plan.length === 1 ? "one bucket" : `${plan.length} buckets`;
    let text =
      `Predicted with ${buckets}: ${time(step.end)}, of which ${time(all.exposed)} wait for the network. ` +
      `No plan ends before ${time(limit)}; one message after backward takes ${time(flat)}. ${advice(all, state)}`;
    if (recorded) {
      const given = recorded.predicted ?? step.end;
      const error = 100 * (given / recorded.end - 1);
      const side = error < 0 ? "below" : "above";
      const away = `${Math.abs(error).toFixed(1)} % ${side} it`;
      text += recorded.predicted
        ? ` Recorded: ${time(recorded.end)}. From the times at which rank 0's gradients were ready in it, the rule gives ${time(given)}, ${away}.`
        : ` Measured: ${time(recorded.end)}; the prediction is ${away}.`;
    }
    return text;
  }

  Figures.register({
    name: "bucket_timeline",
    title: "The bucket timeline",
    tryThis: "Drag the bucket cap, and watch the time that the step waits for the network.",
    state: { model: "stack", cap: 1, first: OWN_CAP, gbit: 1, latency: 50, w: 2, speed: 1, overlap: true },
    controls,
    draw,
    says,
  });
})();
