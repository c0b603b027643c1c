// The bucket timeline: bucket plans and simulated steps, as pure functions without a page.
//
// The same functions in Python are miniddp.buckets (bucketCaps, arrivalPlan) and
// labkit.profiling.cost_model and sweeps (linkOf, ring, simulate, lowerLimit, backwardLike).
// Times are in seconds, sizes in bytes, caps in bytes unless the name says MiB.
(function (root, make) {
  if (typeof module === "object") module.exports = make();
  else (root.FigureLogic ??= {}).bucket_timeline = make();
})(this, function () {
  "use strict";

  const MIB = 2 ** 20;

  const sum = (numbers) => numbers.reduce((total, one) => total + one, 0);

  // A first cap of null means: the same cap for every bucket, as with an explicit bucket_cap_mb.
  function bucketCaps(capMiB, firstMiB = null) {
    const caps = firstMiB === null ? [capMiB] : [firstMiB, capMiB];
    return caps.map((cap) => Math.floor(cap * MIB));
  }

  // The plan for gradients in their order of arrival: a bucket closes once it reaches its cap.
  function arrivalPlan(bytes, caps) {
    const plan = [];
    let open = [];
    let size = 0;
    bytes.forEach((one, place) => {
      open.push(place);
      size += one;
      if (size >= caps[Math.min(plan.length, caps.length - 1)]) {
        plan.push(open);
        open = [];
        size = 0;
      }
    });
    return open.length ? [...plan, open] : plan;
  }

  function linkOf(gbitPerS, latencyUs) {
    return { latency: latencyUs * 1e-6, secondsPerByte: 8e-9 / gbitPerS };
  }

  function ring(ranks, bytes) {
    return { steps: 2 * (ranks - 1), bytes: ((2 * (ranks - 1)) / ranks) * bytes };
  }

  function ringSeconds(link, ranks, bytes) {
    const cost = ring(ranks, bytes);
    return cost.steps * link.latency + cost.bytes * link.secondsPerByte;
  }

  // Each gradient takes its share of the backward, in proportion to its size.
  function backwardLike(bytes, forward, backward) {
    const total = sum(bytes);
    let done = 0;
    const ready = bytes.map((one) => {
      done += one;
      return forward + (backward * done) / total;
    });
    return { forward, ready, bytes };
  }

  // A backward in which everything after the forward takes 1/speed of the time.
  function faster(backward, speed) {
    const { forward, ready, bytes } = backward;
    return { forward, ready: ready.map((one) => forward + (one - forward) / speed), bytes };
  }

  // Buckets are launched in order, and the link carries one all-reduce at a time.
  function simulate(backward, plan, allReduce, overlap = true) {
    const computeEnd = backward.ready[backward.ready.length - 1];
    let launched = 0;
    let free = 0;
    const sent = plan.map((bucket) => {
      const last = bucket.reduce((most, place) => Math.max(most, place), 0);
      launched = Math.max(launched, overlap ? backward.ready[last] : computeEnd);
      const begun = Math.max(launched, free);
      const bytes = sum(bucket.map((place) => backward.bytes[place]));
      free = begun + allReduce(bytes);
      return { launched, begun, done: free, bytes };
    });
    return { sent, computeEnd, end: Math.max(computeEnd, free) };
  }

  // The bucket from which on the link works without a pause until the end of the step.
  // The critical path: compute until this bucket is launched, then this and all later buckets.
  function criticalBucket(step) {
    let first = step.sent.length - 1;
    while (first > 0 && step.sent[first].launched <= step.sent[first - 1].done) first -= 1;
    return first;
  }

  function lowerLimit(backward, allReduce) {
    const computeEnd = backward.ready[backward.ready.length - 1];
    return Math.max(computeEnd, backward.ready[0] + allReduce(sum(backward.bytes)));
  }

  // Everything that the figure shows. `backward` is { forward, ready, bytes }; the choices are
  // { w, gbit, latency, cap, first, speed, overlap }, with cap and first in MiB, and first null
  // where the cap holds for all buckets.
  function predict(backward, choices) {
    const { w, gbit, latency, cap, first, speed, overlap } = choices;
    const compute = faster(backward, speed);
    const link = linkOf(gbit, latency);
    const allReduce = (bytes) => ringSeconds(link, w, bytes);
    const everything = [compute.bytes.map((_, place) => place)];
    const plan = overlap ? arrivalPlan(compute.bytes, bucketCaps(cap, first)) : everything;
    const step = simulate(compute, plan, allReduce, overlap);
    const flat = simulate(compute, everything, allReduce, false);
    return {
      compute,
      plan,
      step,
      critical: criticalBucket(step),
      exposed: step.end - step.computeEnd,
      limit: lowerLimit(compute, allReduce),
      flat: flat.end,
      linkBusy: sum(step.sent.map((one) => one.done - one.begun)),
    };
  }

  return {
    MIB,
    arrivalPlan,
    backwardLike,
    bucketCaps,
    criticalBucket,
    faster,
    linkOf,
    lowerLimit,
    predict,
    ring,
    ringSeconds,
    simulate,
  };
});
