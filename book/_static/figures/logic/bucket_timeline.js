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

  // Data: written by python -m labkit.book.timeline_data.
  const DATA = {"link":{"gbit_per_s":1,"latency_us":50,"ranks":2}
,"models":{"stack":{"bytes":[2048,1048576,2048,1048576,2048,1048576,2048,1048576,2048,1048576,2048,1048576],"forward":44493
,"ready":[63684,63719,72974,73058,78149,78182,87420,87458,100814,100921,103681,103716]
,"ways":{"flat":{"caps":[1048576,26214400]
,"ready":[63684,63719,72974,73058,78149,78182,87420,87458,100814,100921,103681,103716],"forward":44493,"bytes":[6303792],"launched":[111571],"done":[164502]},"torch's caps":{"caps":[1048576,26214400]
,"ready":[33653,33768,47424,47503,52620,52686,58080,58149,63831,63899,67378,67438],"forward":20901,"bytes":[1050624,5253120],"launched":[34085,67700],"done":[45881,138648]},"1 MiB":{"caps":[1048576]
,"ready":[39691,39797,56741,56843,69411,69496,82672,82755,98176,98276,106957,107046],"forward":27581,"bytes":[1050624,1050624,1050624,1050624,1050624,1050624],"launched":[44127,57147,69755,84928,98536,107289],"done":[54067,67524,80314,93630,112476,122115]},"2 MiB":{"caps":[2097152]
,"ready":[21250,21355,26333,26416,32167,32241,37314,37386,64898,64987,80964,81060],"forward":14863,"bytes":[2101248,2101248,2101248],"launched":[26674,37713,81370],"done":[93453,110900,127848]}}}
,"transformer":{"bytes":[1024,1024,1024,1048576,4096,1048576,1024,1024,1024,262144,3072,786432,1024,1024,1024,1048576,4096,1048576,1024,1024,1024,262144,3072,786432,1024,1024,1024,1048576,4096,1048576,1024,1024,1024,262144,3072,786432,1024,1024,1024,1048576,4096,1048576,1024,1024,1024,262144,3072,786432,1024,1024,1024,1048576,4096,1048576,1024,1024,1024,262144,3072,786432,1024,1024,1024,1048576,4096,1048576,1024,1024,1024,262144,3072,786432,1024,1024,1024,1048576,4096,1048576,1024,1024,1024,262144,3072,786432,1024,1024,1024,1048576,4096,1048576,1024,1024,1024,262144,3072,786432],"forward":314625
,"ready":[316089,316114,349890,349936,373705,373754,374240,374262,376353,376393,395735,406503,409575,409600,420842,420889,430375,430413,430784,430797,432396,432422,438066,442581,444005,444023,450077,450108,456427,456471,456912,456928,458853,458883,463936,468593,469000,469012,474451,474493,481589,481640,482084,482102,484391,484429,490464,495482,495840,495855,501411,501444,507411,507442,507819,507833,509667,509724,514083,518366,518713,518728,525102,525137,532609,532658,533123,533143,535383,535424,541269,546893,547386,547421,555397,555439,567584,567635,568098,568119,578172,578221,587566,593898,594295,594314,599571,599603,605943,605977,606399,606414,607991,608022,612837,614913]
,"ways":{"flat":{"caps":[1048576,26214400]
,"ready":[140854,140878,158699,158734,170113,170290,171332,171348,172941,172968,181958,186443,188961,188980,201139,201173,209784,209819,210170,210197,211850,211879,216436,222819,223206,223239,228460,228490,235883,235927,236495,236511,238298,238337,242986,247075,247446,247462,252744,252784,269588,269629,270014,270028,271677,271706,276810,280887,281419,281436,287046,287079,294678,294713,295078,295093,296853,296881,301785,307698,308173,308194,315828,315863,322557,322595,322986,323000,324626,324655,329535,333490,333850,333865,339593,339642,346305,346364,346909,346924,349211,349372,354466,358553,358923,358939,372305,372356,387306,387346,387731,387745,393689,393731,401820,407542],"forward":139323,"bytes":[25272704],"launched":[418404],"done":[829536]},"torch's caps":{"caps":[1048576,26214400]
,"ready":[190281,190354,195747,195817,202846,202941,203510,203552,205273,205334,209734,213729,214501,214549,220280,220366,226681,226757,227376,227415,228992,229044,233393,237373,237900,238076,243415,243480,249782,249860,250615,250663,252260,252311,256774,261045,261570,261621,267045,267112,273731,273832,274598,274643,276365,276422,281097,286677,287318,287366,294845,294947,301226,301300,301867,301905,303625,303682,311943,315850,316433,316470,321834,321907,331341,331429,332044,332088,333757,333814,338695,343601,344198,344239,349722,349795,368764,368854,369480,369525,379463,379536,391675,417426,422181,422251,436013,436091,452278,452356,452973,453010,458869,458965,469907,472022],"forward":188525,"bytes":[1051648,24220672],"launched":[196113,472277],"done":[247210,699093]},"1 MiB":{"caps":[1048576]
,"ready":[106843,106913,112291,112350,119277,119357,120125,120165,122114,122168,126368,130337,131887,131994,136942,136994,144180,144246,145150,145190,151541,151596,160873,165254,169097,169143,180552,180613,188182,188248,189954,190015,191687,191738,196295,200268,202681,202723,207786,207851,215350,215412,217423,217465,219306,219358,224041,227963,231541,231585,237391,237445,244947,245010,247083,247128,248717,248767,252911,256935,259239,259288,264278,264332,271954,272020,273965,274008,275772,275823,280008,283887,285910,285953,290943,291000,304322,304389,305807,305852,311672,311729,318985,322994,324933,324973,330026,330080,337806,337883,340080,340132,342388,342445,347006,349170],"forward":105243,"bytes":[1051648,1052672,1054720,1051648,1052672,1054720,1051648,1052672,1054720,1051648,1052672,1054720,1051648,1052672,1054720,1051648,1052672,1054720,1051648,1052672,1054720,1051648,1052672,1054720],"launched":[112569,119582,130570,137236,144472,165473,180872,188478,200484,208089,215671,228171,237696,245255,257206,264570,272236,284117,291232,304612,323228,330304,338129,349418],"done":[121289,129820,141445,147943,157768,174220,189733,198163,209198,217855,226251,236885,246392,254945,265959,274556,282990,299012,313098,314374,331941,340450,354996,379210]},"4 MiB":{"caps":[4194304]
,"ready":[137484,137548,149645,149722,159852,159934,160475,160507,162107,162156,166157,172932,173452,173489,192310,192384,201672,201765,202333,202370,209161,209232,221277,232891,236851,236952,244002,244081,250215,250280,251336,251382,252961,253014,257440,261569,262142,262180,267650,267723,273897,273966,274545,274583,279528,279599,284083,292217,293307,293354,298560,298636,309488,309577,310164,310205,319875,319952,332656,350316,356183,356265,374136,374208,395522,395599,396163,396199,397786,397845,402250,406926,407440,407481,412844,412907,429230,429309,432205,432256,433913,433969,439183,443004,443540,443577,459915,460049,466178,466241,466807,466842,468449,468500,479106,481144],"forward":135930,"bytes":[4210688,4211712,4213760,4210688,4211712,4213760],"launched":[192623,250576,292515,374479,429596,481398],"done":[267169,304213,370138,420675,463594,515501]}}}
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

  // The recorded step of these choices (see predict), if there is one; null otherwise.
  function recorded(name, { w, gbit, latency, cap, first, speed, overlap }) {
    const { ranks, gbit_per_s: rate, latency_us: alpha } = DATA.link;
    if (w !== ranks || gbit !== rate || latency !== alpha || speed !== 1) return null;
    const caps = String(bucketCaps(cap, first));
    const found = Object.entries(DATA.models[name].ways).find(([way, step]) =>
      overlap ? way !== "flat" && String(step.caps) === caps : way === "flat",
    );
    if (!found) return null;
    const [way, step] = found;
    const begun = seconds(step.launched);
    const done = seconds(step.done);
    const sent = step.bytes.map((bytes, place) => ({
      bytes,
      launched: begun[place],
      // The link carries one message at a time.
      begun: Math.max(begun[place], place ? done[place - 1] : 0),
      done: done[place],
    }));
    const [forward] = seconds([step.forward]);
    return { way, forward, ready: seconds(step.ready), sent, end: Math.max(...done) };
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
