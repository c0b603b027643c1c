// One data-parallel step of the model a·x + b with squared errors, in closed form.
//
// A test compares it with what real ranks of torch's DDP end with.
(function (root, make) {
  if (typeof module === "object") module.exports = make();
  else (root.FigureLogic ??= {}).one_step = make();
})(this, function () {
  "use strict";

  const WEIGHTS = [0.5, 2];
  const RATE = 0.01;
  const MICRO_BATCHES = 2;

  const add = (one, other) => [one[0] + other[0], one[1] + other[1]];
  const scale = (factor, vector) => [factor * vector[0], factor * vector[1]];
  const total = (vectors) => vectors.reduce(add, [0, 0]);
  const length = (vector) => Math.hypot(vector[0], vector[1]);

  // A rank's samples are x, y, x, y, …
  const pairs = (flat) =>
    Array.from({ length: flat.length >> 1 }, (_, i) => [flat[2 * i], flat[2 * i + 1]]);

  // d/d(a, b) of (a·x + b − y)², summed over samples.
  const summed = (samples) =>
    total(
      samples.map(([x, y]) => {
        const error = WEIGHTS[0] * x + WEIGHTS[1] - y;
        return [2 * error * x, 2 * error];
      }),
    );

  const accumulates = (state) => state.accumulate !== "off";

  // The ranks of this step, and the samples that each of them has.
  function shares(state) {
    const all = state.samples.slice(0, state.w).map(pairs);
    return all.map((own, rank) =>
      state.absent !== "none" && rank === state.w - 1 ? [] : own,
    );
  }

  const batches = (state, own) => {
    if (!accumulates(state)) return [own];
    const first = Math.ceil(own.length / MICRO_BATCHES);
    return [own.slice(0, first), own.slice(first)];
  };

  // What each backward of a rank adds to its .grad.
  function local(state, own, count) {
    const factor = { 1: 1, W: state.w, "1/W": 1 / state.w }[state.factor];
    const averaged = accumulates(state) && state.divide === "own" && state.over_k;
    return batches(state, own).map((batch) => {
      if (batch.length === 0) return [0, 0];
      const divisor = { own: batch.length, all: count, none: 1 }[state.divide];
      return scale(factor / divisor / (averaged ? MICRO_BATCHES : 1), summed(batch));
    });
  }

  const synchronizes = (state) =>
    state.w === 1 || (state.through === "ddp" && state.accumulate !== "never");

  // One all-reduce of the ranks' gradients.
  function combined(state, gradients) {
    const sum = total(gradients);
    if (state.combine === "sum") return sum;
    return scale(1 / (state.absent === "active" ? state.w - 1 : state.w), sum);
  }

  // What every rank's .grad holds after the last backward. An all-reduce after each of them sends
  // what the one before has left in .grad, too, and a rank without data sends zeros.
  function exchanged(state, present, locals) {
    if (state.accumulate !== "each") return combined(state, locals.map(total));
    return locals[0].reduce(
      (held, _, batch) =>
        combined(state, locals.map((own, r) => (present[r] ? add(held, own[batch]) : [0, 0]))),
      [0, 0],
    );
  }

  function compared(found, truth) {
    const lengths = [length(found), length(truth)];
    const dot = found[0] * truth[0] + found[1] * truth[1];
    const defined = lengths[0] > 0 && lengths[1] > 0;
    return {
      ratio: lengths[1] > 0 ? lengths[0] / lengths[1] : null,
      cosine: defined ? dot / (lengths[0] * lengths[1]) : null,
    };
  }

  // The bounds of labkit.testing.compare.kind_of.
  function kindOf({ ratio, cosine }) {
    if (ratio === null) return "undefined";
    if (ratio === 0) return "zero";
    if (cosine < 1 - 1e-4) return "direction bug";
    return Math.abs(ratio - 1) < 5e-3 ? "right" : "scale bug";
  }

  const sgd = (gradient) => gradient.map((each, i) => WEIGHTS[i] - RATE * each);
  // The first step of Adam: both moments are corrected to g and g².
  const adam = (gradient) =>
    gradient.map((each, i) => WEIGHTS[i] - (RATE * each) / (Math.abs(each) + 1e-8));

  // The row of the table in "When do I multiply by the world size?"; 0 if it has none.
  function leafOf(state) {
    const present = shares(state).filter((own) => own.length > 0);
    if (!synchronizes(state)) return 0;
    const divides = state.combine === "average" || state.divide === "own";
    if (state.absent !== "none" && divides) return 0;
    if (state.accumulate === "each" && state.combine === "sum" && state.w > 1) return 0;
    if (accumulates(state) && state.divide === "own" && !state.over_k) return 0;
    const counts = present.flatMap((own) => batches(state, own).map((batch) => batch.length));
    const equal = counts.every((count) => count === counts[0]);
    if (state.combine === "sum") return state.divide === "own" ? (equal ? 11 : 0) : 10;
    return { own: equal ? 1 : 2, all: 3, none: 4 }[state.divide];
  }

  function step(state) {
    const owned = shares(state);
    const everything = owned.flat();
    const locals = owned.map((own) => local(state, own, everything.length));
    const present = owned.map((own) => own.length > 0);
    const synchronized = synchronizes(state);
    const combination = exchanged(state, present, locals);
    const finals = locals.map((own) => (synchronized ? combination : total(own)));
    const truth = scale(state.divide === "none" ? 1 : 1 / everything.length, summed(everything));
    const comparisons = finals.map((found) => compared(found, truth));
    const passes = accumulates(state) ? MICRO_BATCHES : 1;
    return {
      counts: owned.map((own) => own.length),
      local: locals.map(total),
      final: finals,
      synchronized,
      truth,
      ratio: comparisons.map((each) => each.ratio),
      cosine: comparisons.map((each) => each.cosine),
      kind: comparisons.map(kindOf),
      leaf: leafOf(state),
      all_reduces: !synchronized || state.w === 1 ? 0 : state.accumulate === "each" ? passes : 1,
      sgd: finals.map(sgd),
      adam: finals.map(adam),
      sgd_truth: sgd(truth),
      adam_truth: adam(truth),
    };
  }

  return { step, WEIGHTS, RATE };
});
