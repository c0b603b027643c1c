// Memory and traffic: bytes that each rank keeps and sends, as pure functions without a page.
//
// Two rules give every number. Memory: what a strategy splits over n ranks takes 1/n of its bytes
// on each; the rest is on every rank. Traffic: to reduce-scatter or to all-gather b bytes over n
// ranks, each sends b·(n−1)/n; an all-reduce is one of each. Activations, padding, and temporary
// buffers are left out. Sources: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
// Trillion Parameter Models" (2020), sections 3 and 7; torch's documentation of `fully_shard`.
// A job is { parameters, ranks, precision, optimizer, bucketViews, freeWeights, shardRanks, every }.
(function (root, make) {
  if (typeof module === "object") module.exports = make();
  else (root.FigureLogic ??= {}).memory_and_traffic = make();
})(this, function () {
  "use strict";

  const STRATEGIES = ["ddp", "zero1", "zero2", "fsdp", "hsdp", "local"];
  const WEIGHT_BYTES = { fp32: 4, bf16: 2 };
  const MASTER_BYTES = { fp32: 0, bf16: 4 };
  const OPTIMIZER_BYTES = { sgd: 0, momentum: 4, adam: 8 };

  const total = (parts) => Object.values(parts).reduce((sum, one) => sum + one, 0);

  // What each of `ranks` sends to reduce-scatter, or to all-gather, `bytes` in all.
  const scatteredBytes = (bytes, ranks) => (bytes * (ranks - 1)) / ranks;

  // How many ranks share one copy of what is split.
  const sharedBy = (job, strategy) => (strategy === "hsdp" ? job.shardRanks : job.ranks);

  // What a strategy splits, each over sharedBy() ranks.
  function splits(strategy) {
    const weights = strategy === "fsdp" || strategy === "hsdp";
    const gradients = weights || strategy === "zero2";
    return { weights, gradients, optimizer: gradients || strategy === "zero1" };
  }

  function memory(job, strategy) {
    const split = splits(strategy);
    const over = (isSplit) => (isSplit ? sharedBy(job, strategy) : 1);
    const computing = job.parameters * WEIGHT_BYTES[job.precision];
    const gathered = split.weights && !job.freeWeights ? computing : 0;
    const parts = {
      weights: gathered + computing / over(split.weights),
      gradients: computing / over(split.gradients),
      buckets: strategy === "ddp" && !job.bucketViews ? computing : 0,
      master: (job.parameters * MASTER_BYTES[job.precision]) / over(split.optimizer),
      optimizer: (job.parameters * OPTIMIZER_BYTES[job.optimizer]) / over(split.optimizer),
    };
    return { ...parts, total: total(parts) };
  }

  function traffic(job, strategy) {
    const ranks = sharedBy(job, strategy);
    const computing = job.parameters * WEIGHT_BYTES[job.precision];
    const averaged = job.parameters * MASTER_BYTES[job.precision] || computing;
    const once = scatteredBytes(computing, ranks);
    const gathers = job.freeWeights ? 2 : 1;
    const across = 2 * scatteredBytes(computing / ranks, job.ranks / ranks);
    const parts = {
      ddp: { gradients: 2 * once, weights: 0, across: 0 },
      zero1: { gradients: once, weights: once, across: 0 },
      zero2: { gradients: once, weights: once, across: 0 },
      fsdp: { gradients: once, weights: gathers * once, across: 0 },
      hsdp: { gradients: once, weights: gathers * once, across },
      local: { gradients: 0, weights: (2 * scatteredBytes(averaged, ranks)) / job.every, across: 0 },
    }[strategy];
    return { ...parts, total: total(parts) };
  }

  // Both for every strategy, in the order of STRATEGIES.
  const compare = (job) =>
    STRATEGIES.map((strategy) => ({
      strategy,
      memory: memory(job, strategy),
      traffic: traffic(job, strategy),
    }));

  return { STRATEGIES, compare, memory, scatteredBytes, sharedBy, splits, traffic };
});
