// The tree of "When do I multiply by the world size?" as questions. A test compares its
// leaves with those of the chapter's own tree, and with what these printed.
(function (root, make) {
  if (typeof module === "object") module.exports = make();
  else (root.FigureLogic ??= {}).which_factor = make();
})(this, function () {
  "use strict";

  // An answer is [value, text, the next question or the number of a leaf].
  const QUESTIONS = {
    combine: {
      text: "How are the ranks' gradients combined?",
      answers: [
        ["average", "averaged (DDP, FSDP, Horovod)", "sees"],
        ["sum", "summed", "summed"],
      ],
    },
    summed: {
      text: "What does the loss divide by?",
      answers: [
        ["all", "the global count", 10],
        ["own", "its own count, equal on all ranks", 11],
      ],
    },
    sees: {
      text: "Which samples does a rank's loss see?",
      answers: [
        ["own", "its own only", "divide"],
        ["all", "samples of all ranks, gathered", "computes"],
      ],
    },
    divide: {
      text: "What does the loss divide by?",
      answers: [
        ["own", "its own count", "counts"],
        ["all", "the global count", 3],
        ["none", "nothing (reduction=\"sum\")", 4],
      ],
    },
    counts: {
      text: "Do all ranks have the same number of samples, tokens, or boxes?",
      answers: [
        ["equal", "yes, always", 1],
        ["unequal", "not always", 2],
      ],
    },
    computes: {
      text: "What does each rank compute?",
      answers: [
        ["whole", "the whole loss", "whole"],
        ["rows", "its own rows of it", "rows"],
      ],
    },
    whole: {
      text: "Does the gather carry gradient?",
      answers: [
        ["gradient", "yes", 5],
        ["plain", "no; the rank reinserts its own slice", 6],
      ],
    },
    rows: {
      text: "Does the gather carry gradient, and what divides the own rows?",
      answers: [
        ["all", "yes; the global count", 7],
        ["own", "yes; the own count", 8],
        ["plain", "no", 9],
      ],
    },
  };

  const OVER_ALL = "loss = losses.sum() / samples_on_all_ranks";
  // The factor that is right, the line to write, and what the chapter's leaf printed on two ranks
  // for the factor 1: ratio and cosine.
  const LEAVES = {
    1: { factor: "1", line: "loss = losses.mean()", measured: [1, 1], why: "The average of equally large means is the mean over all samples." },
    2: { factor: "none", line: `${OVER_ALL} * world_size`, measured: [1.1622, 0.8027], why: "A sample on a rank with few samples counts for more. No factor repairs that: divide by the global count instead." },
    3: { factor: "W", line: `${OVER_ALL} * world_size`, measured: [0.5, 1], why: "The average divides by W once more, so multiply by W." },
    4: { factor: "W", line: "loss = losses.sum() * world_size", measured: [0.5, 1], why: "If you mean the sum over all samples, multiply by W to undo the average." },
    5: { factor: "1", line: "loss = whole_loss(gather_with_gradient(outputs))", measured: [1, 1], why: "Every rank computes the same loss L, so the ranks' losses add up to W·L already." },
    6: { factor: "W", line: "loss = whole_loss(gather_with_own_slice(outputs)) * world_size", measured: [0.5, 1], why: "Each rank's gradient covers its own samples only. Not for parameters of the loss itself, such as a learned temperature: theirs is right without the factor." },
    7: { factor: "W", line: "loss = own_rows(gather_with_gradient(outputs)).sum() / samples_on_all_ranks * world_size", measured: [0.5, 1], why: "The ranks' losses add up to L, and the average divides by W." },
    8: { factor: "1", line: "loss = own_rows(gather_with_gradient(outputs)).mean()", measured: [1, 1], why: "Dividing by the own count, one W-th of all, is the factor W already. The counts must be equal." },
    9: { factor: "none", line: "loss = own_rows(gather_with_gradient(outputs)).mean()", measured: [0.9991, 0.9137], why: "The rows of other ranks send no gradient to an output. No factor brings it back: gather with gradient." },
    10: { factor: "1", line: OVER_ALL, measured: [1, 1], why: "The ranks' losses are the pieces of one mean, and the sum puts them together." },
    11: { factor: "1/W", line: "loss = losses.mean() / world_size", measured: [2, 1], why: "Each rank adds a whole mean: the sum is W times too large." },
  };

  const below = (target) =>
    typeof target === "number"
      ? [target]
      : QUESTIONS[target].answers.flatMap(([, , next]) => below(next));

  // Follow the answers from the first question to a leaf, or to a question without an answer.
  function walk(answers) {
    const asked = [];
    let target = "combine";
    while (typeof target === "string") {
      asked.push(target);
      const given = QUESTIONS[target].answers.find(([value]) => value === answers[target]);
      if (!given) return { asked, leaf: null, possible: below(target) };
      target = given[2];
    }
    return { asked, leaf: target, possible: [target] };
  }

  return { QUESTIONS, LEAVES, walk, leaf: (number) => LEAVES[number] };
});
