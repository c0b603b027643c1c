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

  // Data: written by labs/benchmarks/timeline_data.py.
  const DATA = {"link":{"gbit_per_s":1,"latency_us":50,"ranks":2}
,"models":{"stack":{"bytes":[2048,1048576,2048,1048576,2048,1048576,2048,1048576,2048,1048576,2048,1048576],"forward":18186
,"ready":[25207,25235,31301,31322,37604,37626,43616,43635,50138,50162,53453,53476]
,"ways":{"flat":{"caps":[1048576,26214400]
,"ready":[25207,25235,31301,31322,37604,37626,43616,43635,50138,50162,53453,53476],"forward":18186,"bytes":[6303792],"launched":[54981],"done":[105814]},"torch's caps":{"caps":[1048576,26214400]
,"ready":[24058,24134,30927,30981,36994,37045,43274,43332,49364,49409,52492,52520],"forward":17494,"bytes":[1050624,5253120],"launched":[24293,52681],"done":[37338,96716]},"1 MiB":{"caps":[1048576]
,"ready":[24286,24380,31526,31595,38499,38563,45551,45612,52270,52315,56092,56145],"forward":17428,"bytes":[1050624,1050624,1050624,1050624,1050624,1050624],"launched":[24535,31772,38728,45773,52462,56295],"done":[33420,42473,51521,60523,69081,77581]},"2 MiB":{"caps":[2097152]
,"ready":[25442,25549,32016,32062,38643,38678,44647,44684,51439,51504,55693,55741],"forward":18490,"bytes":[2101248,2101248,2101248],"launched":[32236,44855,55904],"done":[51787,66303,83319]}}}
,"transformer":{"bytes":[1024,1024,1024,1024,1024,1048576,4096,1048576,1024,262144,3072,786432,1024,1024,1024,1024,1024,1048576,4096,1048576,1024,262144,3072,786432,1024,1024,1024,1024,1024,1048576,4096,1048576,1024,262144,3072,786432,1024,1024,1024,1024,1024,1048576,4096,1048576,1024,262144,3072,786432,1024,1024,1024,1024,1024,1048576,4096,1048576,1024,262144,3072,786432,1024,1024,1024,1024,1024,1048576,4096,1048576,1024,262144,3072,786432,1024,1024,1024,1024,1024,1048576,4096,1048576,1024,262144,3072,786432,1024,1024,1024,1024,1024,1048576,4096,1048576,1024,262144,3072,786432],"forward":75218,"backward":143243
,"ways":{"flat":{"caps":[1048576,26214400],"end":430967},"torch's caps":{"caps":[1048576,26214400],"end":426401},"1 MiB":{"caps":[1048576],"end":308106},"2 MiB":{"caps":[2097152],"end":287576},"4 MiB":{"caps":[4194304],"end":312994},"8 MiB":{"caps":[8388608],"end":322421},"16 MiB":{"caps":[16777216],"end":374315}}}
,"assumed":{"bytes":[1024,1024,1024,1024,1024,1048576,4096,1048576,1024,262144,3072,786432,1024,1024,1024,1024,1024,1048576,4096,1048576,1024,262144,3072,786432,1024,1024,1024,1024,1024,1048576,4096,1048576,1024,262144,3072,786432,1024,1024,1024,1024,1024,1048576,4096,1048576,1024,262144,3072,786432,1024,1024,1024,1024,1024,1048576,4096,1048576,1024,262144,3072,786432,1024,1024,1024,1024,1024,1048576,4096,1048576,1024,262144,3072,786432,1024,1024,1024,1024,1024,1048576,4096,1048576,1024,262144,3072,786432,1024,1024,1024,1024,1024,1048576,4096,1048576,1024,262144,3072,786432],"forward":80000,"backward":160000
,"ways":{}}}};
  // End of data.

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

  const seconds = (microseconds) => microseconds.map((one) => one * 1e-6);

  // The backward of a model of the data: as recorded, or spread over the gradients.
  function backwardOf(name) {
    const { bytes, forward, ready, backward } = DATA.models[name];
    return ready
      ? { forward: forward * 1e-6, ready: seconds(ready), bytes }
      : backwardLike(bytes, forward * 1e-6, backward * 1e-6);
  }

  // The recorded step of these choices (see predict), if there is one; null otherwise. `predicted`
  // is its end as the rule gives it from the times at which its own gradients were ready. Of a
  // step that was timed as a whole, only the end is known, and sent is empty.
  function recorded(name, { w, gbit, latency, cap, first, speed, overlap }) {
    const { ranks, gbit_per_s: rate, latency_us: alpha } = DATA.link;
    if (w !== ranks || gbit !== rate || latency !== alpha || speed !== 1) return null;
    const caps = String(bucketCaps(cap, first));
    const found = Object.entries(DATA.models[name].ways).find(([way, step]) =>
      overlap ? way !== "flat" && String(step.caps) === caps : way === "flat",
    );
    if (!found) return null;
    const [way, step] = found;
    if (step.end) return { way, end: step.end * 1e-6, sent: [] }; // timed as a whole
    const launched = seconds(step.launched);
    const done = seconds(step.done);
    const sent = step.bytes.map((bytes, place) => ({
      bytes,
      launched: launched[place],
      // The link carries one message at a time.
      begun: Math.max(launched[place], place ? done[place - 1] : 0),
      done: done[place],
    }));
    const [forward] = seconds([step.forward]);
    const ready = seconds(step.ready);
    const { bytes } = DATA.models[name];
    const choices = { w, gbit, latency, cap, first, speed, overlap };
    const predicted = predict({ forward, ready, bytes }, choices).step.end;
    return { way, forward, ready, sent, end: Math.max(...done), predicted };
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
    const linkBusy = sum(step.sent.map((one) => one.done - one.begun));
    return {
      compute,
      plan,
      step,
      critical: criticalBucket(step),
      exposed: step.end - step.computeEnd,
      limit: lowerLimit(compute, allReduce),
      flat: flat.end,
      linkBusy,
      latencyShare: linkBusy ? (plan.length * allReduce(0)) / linkBusy : 0,
    };
  }

  return {
    MIB,
    arrivalPlan,
    backwardLike,
    backwardOf,
    bucketCaps,
    criticalBucket,
    faster,
    linkOf,
    lowerLimit,
    predict,
    recorded,
    ring,
    ringSeconds,
    simulate,
  };
});
