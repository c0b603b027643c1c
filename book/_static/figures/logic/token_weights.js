// The weight of one token in the loss of an optimizer step, for a mean and a denominator. A test
// compares it with the gradients of the same means in torch.
(function (root, make) {
  if (typeof module === "object") module.exports = make();
  else (root.FigureLogic ??= {}).token_weights = make();
})(this, function () {
  "use strict";

  const LONGEST = 12;
  const sum = (numbers) => numbers.reduce((total, each) => total + each, 0);

  // Completions 2i and 2i + 1 have the same prompt. A loss is a sum over a count: per completion,
  // what a token contributes to the sum, and what the completion contributes to the count.
  function sumAndCount(mean, lengths) {
    const group = lengths.map((_, i) => lengths[i - (i % 2)] + lengths[i - (i % 2) + 1]);
    return {
      token: { unit: lengths.map(() => 1), count: lengths },
      sequence: { unit: lengths.map((n) => 1 / n), count: lengths.map(() => 1) },
      prompt: { unit: group.map((n) => 1 / n), count: lengths.map(() => 1 / 2) },
      constant: { unit: lengths.map(() => 1 / LONGEST), count: lengths.map(() => 1) },
    }[mean];
  }

  // `cells` has the micro-batch of each completion: rank · k + number. `by` is "micro" or "rank"
  // for their own counts, or "all". The gradients are averaged over w ranks.
  function weights({ lengths, cells, mean, by, w, k }) {
    const { unit, count } = sumAndCount(mean, lengths);
    const over = (belongs) => sum(count.filter((_, i) => belongs(cells[i])));
    const total = sum(count);
    return lengths.map((_, i) => {
      const rank = Math.floor(cells[i] / k);
      const divisor = {
        all: () => total / w,
        rank: () => over((cell) => Math.floor(cell / k) === rank),
        micro: () => over((cell) => cell === cells[i]) * k,
      }[by]();
      return { found: unit[i] / divisor / w, right: unit[i] / total };
    });
  }

  return { LONGEST, weights };
});
