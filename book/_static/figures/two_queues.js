// Two ranks' collectives as two queues: what pairs, what is mixed, and where it hangs.
(function () {
  "use strict";

  const { parse, write, value, pairUp, presets, names } = FigureLogic.two_queues;
  const MOST = 8; // calls per rank
  const ROW = 58, BOX = 44, TOP = 76;
  const SHORT = { float32: "", float16: "fp16", bfloat16: "bf16" };
  const WORDS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight"];

  const queuesOf = (state) => [parse(state.q0), parse(state.q1)];
  const runOf = (state) => pairUp(...queuesOf(state), state.detail);
  const selected = (state) => queuesOf(state)[state.rank][state.at];

  function clean(state) {
    const queues = queuesOf(state).map((queue) => queue.slice(0, MOST));
    const rank = state.rank === 1 ? 1 : 0;
    const last = Math.min(queues[rank].length, MOST - 1);
    const at = Math.min(Math.max(Math.trunc(state.at), 0), last);
    return { ...state, q0: write(queues[0]), q1: write(queues[1]), rank, at };
  }

  // ---- changes of the queues ------------------------------------------------------------------

  function withQueue(state, rank, queue, at) {
    return clean({ ...state, [`q${rank}`]: write(queue), rank, at });
  }

  function move(state, rank, from, to) {
    const queue = queuesOf(state)[rank];
    if (from === to || !(from in queue) || !(to in queue)) return {};
    queue.splice(to, 0, ...queue.splice(from, 1));
    return withQueue(state, rank, queue, to);
  }

  function remove(state) {
    const queue = queuesOf(state)[state.rank];
    queue.splice(state.at, 1);
    return withQueue(state, state.rank, queue, state.at);
  }

  // The call that the other rank makes there: most insertions repair a missing call.
  function insert(state) {
    const queues = queuesOf(state);
    const queue = queues[state.rank];
    if (queue.length >= MOST) return {};
    const call = queues[1 - state.rank][state.at] ?? queue[state.at] ?? queue.at(-1) ?? parse("ra12f")[0];
    queue.splice(state.at, 0, call);
    return withQueue(state, state.rank, queue, state.at);
  }

  function edit(state, part) {
    const queue = queuesOf(state)[state.rank];
    const call = { ...queue[state.at], ...part };
    if (call.op !== "barrier" && !call.name) Object.assign(call, { name: "a1", length: 2 });
    queue[state.at] = call;
    return withQueue(state, state.rank, queue, state.at);
  }

  // ---- the editor of the selected call --------------------------------------------------------

  function editor(parent, given, change, { html }) {
    const state = clean(given); // a preset may be shorter than what was selected
    const call = selected(state);
    const queue = queuesOf(state)[state.rank];
    const row = html("div", { class: "figure-controls", style: "gap: 0.4rem 0.6rem", role: "group", "aria-label": "Selected call" }, parent);
    html("strong", { text: `Rank ${state.rank}, call ${state.at + 1}:` }, row);
    const button = (text, enabled, part) => html("button", {
      type: "button", text, "data-focus": text, "aria-disabled": enabled ? null : "true",
      onclick: () => enabled && change(part()),
    }, row);
    button("Insert here", queue.length < MOST, () => insert(state));
    button("Remove", call, () => remove(state));
    button("Earlier", call && state.at > 0, () => move(state, state.rank, state.at, state.at - 1));
    button("Later", call && state.at < queue.length - 1, () => move(state, state.rank, state.at, state.at + 1));
    if (!call) return;
    const select = (label, key, options) => {
      const box = html("label", { text: `${label} ` }, row);
      const list = html("select", {
        "data-focus": key, onchange: () => change(edit(state, { [key]: options[list.selectedIndex] })),
      }, box);
      for (const option of options) html("option", { text: option, selected: option === call[key] }, list);
    };
    select("operation", "op", names.ops);
    if (call.op === "barrier") return;
    select("tensor", "name", names.tensors);
    select("elements", "length", [1, 2, 3, 4]);
    select("dtype", "dtype", names.dtypes);
  }

  // ---- the picture ----------------------------------------------------------------------------

  const LOOKS = {
    right: ["right", ""], mixed: ["wrong", ""], garbled: ["wrong", ""], hang: ["wrong", "4 4"],
    mismatch: ["wrong", "4 4"], error: ["wrong", "4 4"], unreached: ["muted", "2 4"],
  };

  let drag = null;

  function draw(svg, given, change, tools) {
    const state = clean(given);
    const { width, color, paragraph, text } = tools;
    const queues = queuesOf(state);
    const { pairs } = runOf(state);
    const box = Math.min(190, Math.floor(width * 0.355));
    const edges = [2, width - 2 - box];
    const rows = Math.max(1, Math.min(MOST, Math.max(pairs.length, queues[state.rank].length + 1)));
    const rule = "The n-th call of rank 0 pairs with the n-th call of rank 1. Names are not compared.";
    const bottom = paragraph(width / 2, 16, rule, width, { "text-anchor": "middle" });
    const top = Math.max(TOP, bottom + 36);
    edges.forEach((x, rank) => text(x + box / 2, top - 12, `rank ${rank}`, {
      "text-anchor": "middle", "font-weight": 600, fill: color.rank(rank),
    }));
    for (let row = 0; row < rows; row++) {
      const y = top + row * ROW;
      if (row < pairs.length) drawPair(row, y, queues, pairs[row], edges[0] + box, edges[1], tools);
      for (const rank of [0, 1]) drawCall(rank, row, edges[rank], y, box);
    }
    tools.height(top + rows * ROW);

    function drawCall(rank, row, x, y) {
      const call = queues[rank][row];
      const isSelected = state.rank === rank && state.at === row;
      const isNext = row === queues[rank].length;
      if (!call && !isNext) return;
      const outcome = pairs[row]?.outcome;
      const lost = outcome === "unreached";
      const name = call ? describe(call, rank) : "no call";
      const group = tools.svg("g", {
        role: "button", tabindex: isSelected ? 0 : -1, "aria-pressed": String(isSelected),
        "aria-label": `rank ${rank}, call ${row + 1}: ${name}${outcome ? `, ${outcome}` : ""}`,
        "data-call": `${rank}.${row}`, "data-focus": `call ${rank}.${row}`, style: `cursor: ${call ? "grab" : "pointer"}`,
        onclick: () => change({ rank, at: row }),
        onkeydown: (event) => press(event, state, selectAfter, queues),
        onpointerdown: (event) => {
          if (event.pointerType === "mouse" && call) drag = { rank, row, y: event.clientY };
        },
      });
      tools.svg("rect", {
        x, y, width: box, height: BOX, rx: 6, fill: call ? color.soft : color.paper,
        stroke: isSelected ? color.ink : call && !lost ? color.rank(rank) : color.line,
        "stroke-width": isSelected ? 3 : 1.5, "stroke-dasharray": call ? null : "3 4",
      }, group);
      const middle = { "text-anchor": "middle", fill: lost || !call ? color.muted : color.ink };
      const [first, second] = call ? lines(call, rank) : ["no call", ""];
      text(x + box / 2, y + (second ? 18 : 27), first, { ...middle, "font-size": 13, "font-weight": 600 }, group);
      if (second) text(x + box / 2, y + 35, second, { ...middle, "font-size": 12 }, group);
    }

    // A change by a key; the focus follows the selection.
    function selectAfter(part) {
      const { rank, at } = { ...state, ...part };
      change(part);
      svg.querySelector(`[data-call="${rank}.${at}"]`)?.focus({ preventScroll: true });
    }

    svg.onpointerup = (event) => {
      if (!drag) return;
      const scale = svg.viewBox.baseVal.width / svg.getBoundingClientRect().width;
      const to = drag.row + Math.round(((event.clientY - drag.y) * scale) / ROW);
      const last = queues[drag.rank].length - 1;
      const part = move(state, drag.rank, drag.row, Math.min(Math.max(to, 0), last));
      drag = null;
      change(part);
    };
  }

  // The line between two calls, with the numbers above it and what it means below.
  function drawPair(row, y, queues, { outcome }, left, right, { svg, text, color }) {
    const [here, there] = [queues[0][row], queues[1][row]];
    const [tone, dashes] = LOOKS[outcome];
    const middle = (left + right) / 2;
    const line = (from, to) => svg("line", {
      x1: from, x2: to, y1: y + BOX / 2, y2: y + BOX / 2,
      stroke: color[tone], "stroke-width": 2, "stroke-dasharray": dashes,
    });
    if (here && there) line(left, right);
    else line(here ? left : middle, here ? middle : right);
    const [above, below] = captions(outcome, here, there);
    const look = { "text-anchor": "middle", "font-size": right - left < 110 ? 12 : 13 };
    text(middle, y + BOX / 2 - 7, above, look);
    text(middle, y + BOX / 2 + 17, below, { ...look, fill: color[tone], "font-weight": outcome === "right" ? 400 : 600 });
  }

  function captions(outcome, here, there) {
    if (outcome === "unreached") return ["", "not reached"];
    if (outcome === "error") return ["", "error"];
    if (outcome === "hang") return ["", here && there ? "both wait" : `rank ${here ? 0 : 1} waits`];
    if (outcome === "garbled") return ["", "garbled"];
    if (outcome === "mismatch")
      return [here.length === there.length ? "dtypes" : `${here.length} ≠ ${there.length}`, "mismatch"];
    if (here.op === "barrier") return ["", "both pass"];
    const [mine, other] = [value(here, 0), value(there, 1)];
    const numbers = here.op === "broadcast" ? `${mine} → ${other}` : `${mine} + ${other} = ${mine + other}`;
    return [numbers, outcome === "right" ? "same tensor" : `${here.name} with ${there.name}`];
  }

  function lines(call, rank) {
    if (call.op === "barrier") return ["barrier()", ""];
    const elements = new Array(call.length).fill(value(call, rank)).join(" ");
    return [`${call.op}(${call.name})`, `[${elements}] ${SHORT[call.dtype]}`.trim()];
  }

  const describe = (call, rank) => lines(call, rank).join(" ").trim();

  function press(event, state, change, queues) {
    const { rank, at } = state;
    const go = (toRank, toAt) => {
      const last = Math.min(queues[toRank].length, MOST - 1);
      change({ rank: toRank, at: Math.min(Math.max(toAt, 0), last) });
    };
    const upOrDown = (to) => (event.altKey ? change(move(state, rank, at, to)) : go(rank, to));
    const actions = {
      ArrowUp: () => upOrDown(at - 1),
      ArrowDown: () => upOrDown(at + 1),
      ArrowLeft: () => go(0, at),
      ArrowRight: () => go(1, at),
      Delete: () => queues[rank][at] && change(remove(state)),
      Insert: () => change(insert(state)),
    };
    if (!(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  }

  // ---- the sentences below --------------------------------------------------------------------

  function says(state) {
    const [first, second] = queuesOf(state);
    const { pairs, end } = runOf(state);
    const numbered = (outcome) => pairs.flatMap((one, i) => (one.outcome === outcome ? [i + 1] : []));
    const sentences = [];
    const mixed = numbered("mixed");
    if (mixed.length) {
      const [here, there] = [first[mixed[0] - 1], second[mixed[0] - 1]];
      const [mine, other] = [value(here, 0), value(there, 1)];
      const wrong = here.op === "broadcast"
        ? `rank 1's ${there.name} becomes rank 0's ${here.name}`
        : `${here.name} and ${there.name} are added, ${mine} + ${other} = ${mine + other}, instead of ` +
          `${mine} + ${value(here, 1)} = ${mine + value(here, 1)}`;
      sentences.push(`${list(mixed)} without an error, and ${mixed.length > 1 ? "each combines" : "combines"} ` +
        `two different tensors: in call ${mixed[0]}, ${wrong}.`);
    }
    const garbled = numbered("garbled");
    if (garbled.length)
      sentences.push(`${list(garbled)} without an error, and a rank has numbers that mean nothing: ` +
        "it reads bytes that were written in another format or length.");
    const stop = pairs.findIndex(({ outcome }) => ["hang", "mismatch", "error"].includes(outcome));
    if (stop >= 0) sentences.push(ending(pairs[stop].outcome, stop + 1, first[stop], second[stop], state.detail));
    else if (end === "wrong") sentences.push("The run ends, and nothing is reported.");
    else if (pairs.length) sentences.push(`All ${pairs.length} calls pair up with the same tensor: every result is right.`);
    else sentences.push("Neither rank calls anything.");
    return sentences.join(" ");
  }

  function ending(outcome, number, here, there, detail) {
    if (outcome === "error")
      return `Call ${number} raises an error on both ranks: DETAIL has compared operation, shape, and dtype.`;
    if (outcome === "mismatch")
      return `Call ${number} has ${here.length === there.length ? "different dtypes" : `${here.length} and ${there.length} elements`}: ` +
        "at least one rank waits forever, or gloo aborts its process.";
    if (here && there)
      return `At call ${number}, both ranks wait forever: ${here.op} and ${there.op} do not pair.`;
    const [waits, ended] = here ? [0, 1] : [1, 0];
    const timeout = detail ? " At the timeout, DETAIL names the missing rank." : "";
    return `At call ${number}, rank ${waits} waits forever: rank ${ended} makes ` +
      `${number === 1 ? "no call" : `only ${WORDS[number - 1]} call${number === 2 ? "" : "s"}`}.${timeout}`;
  }

  function list(numbers) {
    if (numbers.length === 1) return `Call ${numbers[0]} completes`;
    return `Calls ${numbers.slice(0, -1).join(", ")} and ${numbers.at(-1)} complete`;
  }

  const [, q0, q1] = presets()[0];

  Figures.register({
    name: "two_queues",
    title: "Two queues of collectives",
    tryThis:
      "In each of three steps, rank 1 has no gradient for a and skips its all-reduce. Press “Insert here” to add a1. How many calls does that repair? " +
      "Click a call to edit it. a1: the gradient of a in step 1; rank 1's values are ten times rank 0's.",
    interactive: true,
    state: { q0, q1, rank: 1, at: 0, detail: false },
    clean,
    controls: [
      { kind: "presets", label: "Start from", options: presets().map(([name, a, b]) => [name, { q0: a, q1: b }]) },
      { kind: "switch", key: "detail", label: "TORCH_DISTRIBUTED_DEBUG=DETAIL" },
      { kind: "own", make: editor },
    ],
    draw,
    says,
  });
})();
