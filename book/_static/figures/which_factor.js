// The decision tree as questions: answer them, and get the line to write.
(function () {
  "use strict";

  const { QUESTIONS, LEAVES, walk } = FigureLogic.which_factor;
  const GROUPS = [
    ["averaged, the loss sees own samples", [1, 2, 3, 4]],
    ["averaged, the loss sees all samples", [5, 6, 7, 8, 9]],
    ["summed", [10, 11]],
  ];
  const SHORT = { 1: "×1", W: "×W", "1/W": "×1/W", none: "none works" };
  const SAID = {
    1: "×1: this loss is right as it is.",
    W: "×W: multiply the loss by W.",
    "1/W": "×1/W: divide the loss by W.",
    none: "None works: write a different loss.",
  };

  const controls = (state) =>
    walk(state).asked.map((key) => ({
      kind: "choice",
      key,
      label: QUESTIONS[key].text,
      question: true,
      options: QUESTIONS[key].answers.map(([value, text]) => [value, text]),
    }));

  function says(state) {
    const { leaf, possible } = walk(state);
    if (!leaf) return `${possible.length} of the 11 cases are left.`;
    const { factor, why, measured } = LEAVES[leaf];
    const [ratio, cosine] = measured.map((each) => each.toFixed(4));
    return `${SAID[factor]} ${why} Measured on two ranks with ×1: ratio ${ratio}, cosine ${cosine}.`;
  }

  // The answer for a forum: what was asked and answered, the line, the reason, and the address.
  function markdown(state, address) {
    const { asked, leaf } = walk(state);
    const answers = asked.map((key) => {
      const [, text] = QUESTIONS[key].answers.find(([value]) => value === state[key]);
      return `- ${QUESTIONS[key].text} **${text}**`;
    });
    const code = `\`\`\`python\n${LEAVES[leaf].line}\n\`\`\``;
    return [answers.join("\n"), code, says(state), `[Case ${leaf}](${address})`].join("\n\n");
  }

  function chip(tools, x, y, wide, leaf, { chosen, possible }) {
    const { color } = tools;
    const { factor } = LEAVES[leaf];
    const stroke = factor === "none" ? color.wrong : color.accent;
    const ink = chosen ? color.on : possible ? color.ink : color.muted;
    tools.svg("rect", {
      x: x + 1, y: y + 1, width: wide - 2, height: 42, rx: 5,
      fill: chosen ? stroke : color.paper,
      stroke: possible ? stroke : color.line, "stroke-width": possible ? 2 : 1,
    });
    const [small, large] = [{ "font-size": 12 }, { "font-size": 13, "font-weight": 600 }];
    const middle = { "text-anchor": "middle", fill: ink };
    tools.text(x + wide / 2, y + 17, `case ${leaf}`, { ...middle, "font-size": 12 });
    tools.text(x + wide / 2, y + 35, SHORT[factor], { ...middle, ...(wide < 90 ? small : large) });
  }

  function draw(svg, state, change, tools) {
    const { width, color } = tools;
    const { leaf, possible } = walk(state);
    const gap = 8;
    const wide = Math.min(98, (width - 3 * gap) / 4);
    const perRow = Math.max(1, Math.floor((width + gap + 0.5) / (wide + gap)));
    let y = 16;
    for (const [name, leaves] of GROUPS) {
      const open = leaves.some((each) => possible.includes(each));
      tools.text(0, y, name, { "font-size": 13, fill: open ? color.ink : color.muted });
      y += 10;
      leaves.forEach((each, index) => {
        const [row, column] = [Math.floor(index / perRow), index % perRow];
        chip(tools, column * (wide + gap), y + row * 52, wide, each, {
          chosen: each === leaf,
          possible: possible.includes(each),
        });
      });
      y += Math.ceil(leaves.length / perRow) * 52 + 18;
    }
    tools.text(0, y + 2, "W: the number of ranks", { "font-size": 13, fill: color.muted });
    tools.height(y + 8);

    if (!leaf) return;
    const { line } = LEAVES[leaf];
    tools.html("pre", { class: "figure-code", tabindex: 0, "aria-label": "The line to write", text: line }, tools.after);
    const text = tools.html("p", {}, tools.after);
    const address = tools.page(`start/when_to_multiply.html#leaf-${leaf}`);
    tools.html("a", { href: address, text: `See case ${leaf} run` }, text);
    text.append(", then try your own loss there. ");
    const onclick = () => tools.copy(markdown(state, tools.link()), "Answer");
    tools.html("button", { type: "button", "data-focus": "markdown", text: "Copy as Markdown", onclick }, text);
  }

  Figures.register({
    name: "which_factor",
    title: "Which factor is right?",
    tryThis: "Answer for your own loss. Shown first is the most frequent case.",
    state: {
      combine: "average", sees: "own", divide: "own", counts: "equal",
      summed: "", computes: "", whole: "", rows: "",
    },
    controls,
    draw,
    says,
  });
})();
