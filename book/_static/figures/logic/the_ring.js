/* Which rank sends which elements to which, step by step, in the four all-reduces of
   src/miniddp/collectives/all_reduce.py. A test compares the bytes per link with what those send. */
(function (root, make) {
  if (typeof module === "object") module.exports = make();
  else (root.FigureLogic ??= {}).the_ring = make();
})(this, function () {
  "use strict";

  const modulo = (a, n) => ((a % n) + n) % n;
  const upTo = (n) => Array.from({ length: n }, (_, i) => i);

  /* [begin, end) of each part, as torch's tensor_split has them: the first ones may be longer. */
  function cut(begin, end, parts) {
    const [size, longer] = [Math.floor((end - begin) / parts), (end - begin) % parts];
    const edge = (i) => begin + i * size + Math.min(i, longer);
    return upTo(parts).map((i) => [edge(i), edge(i + 1)]);
  }

  /* The two halves of a ring among `ranks`: in each step every rank sends one chunk to the next. */
  function reduceScatter(ranks, chunks) {
    const n = ranks.length;
    return upTo(n - 1).map((step) => ranks.map((from, i) =>
      message(from, ranks[(i + 1) % n], chunks[modulo(i - step, n)], true)));
  }

  function allGather(ranks, chunks) {
    const n = ranks.length;
    return upTo(n - 1).map((step) => ranks.map((from, i) =>
      message(from, ranks[(i + 1) % n], chunks[modulo(i - step + 1, n)], false)));
  }

  const message = (from, to, [begin, end], adds) => ({ from, to, begin, end, adds });

  /* Schedules of groups that have no rank in common, side by side. */
  const together = (schedules) =>
    schedules[0].map((_, step) => schedules.flatMap((schedule) => schedule[step]));

  const WAYS = {
    naive(world, length) {
      const whole = [0, length];
      const others = upTo(world).slice(1);
      return [
        ...others.map((rank) => [message(rank, 0, whole, true)]),
        ...others.map((rank) => [message(0, rank, whole, false)]),
      ];
    },

    ring(world, length) {
      const ranks = upTo(world);
      const chunks = cut(0, length, world);
      return [...reduceScatter(ranks, chunks), ...allGather(ranks, chunks)];
    },

    doubling(world, length) {
      const whole = [0, length];
      const doublings = Math.floor(Math.log2(world));
      const power = 2 ** doublings;
      const extra = upTo(world).slice(power);
      const steps = upTo(doublings).map((bit) =>
        upTo(power).map((rank) => message(rank, rank ^ (1 << bit), whole, true)));
      if (extra.length) {
        steps.unshift(extra.map((rank) => message(rank, rank - power, whole, true)));
        steps.push(extra.map((rank) => message(rank - power, rank, whole, false)));
      }
      return steps;
    },

    hierarchical(world, length, perNode) {
      const nodes = upTo(world / perNode).map((node) => upTo(perNode).map((i) => node * perNode + i));
      const chunks = cut(0, length, perNode);
      const across = upTo(perNode).map((i) => {
        const ranks = nodes.map((node) => node[i]);
        const parts = cut(...chunks[(i + 1) % perNode], ranks.length);
        return [...reduceScatter(ranks, parts), ...allGather(ranks, parts)];
      });
      return [
        ...together(nodes.map((ranks) => reduceScatter(ranks, chunks))),
        ...together(across),
        ...together(nodes.map((ranks) => allGather(ranks, chunks))),
      ];
    },
  };

  /* Steps, each a list of messages that travel at the same time: {from, to, begin, end, adds}.
     The receiver adds elements [begin, end) to its own, or replaces its own by them. A step waits
     for the step before. `perNode` matters to "hierarchical" only, and divides `world`. */
  function schedule(way, world, length, perNode) {
    return WAYS[way](world, length, perNode);
  }

  /* Each rank's elements after the first `count` steps; `values[rank][element]` before them. */
  function play(steps, values, count) {
    let now = values.map((row) => row.slice());
    for (const step of steps.slice(0, count)) {
      const before = now.map((row) => row.slice());
      for (const { from, to, begin, end, adds } of step)
        for (let i = begin; i < end; i++)
          now[to][i] = adds ? now[to][i] + before[from][i] : before[from][i];
    }
    return now;
  }

  /* sent[from][to]: elements in the first `count` steps. */
  function sent(steps, world, count) {
    const table = upTo(world).map(() => new Array(world).fill(0));
    for (const step of steps.slice(0, count))
      for (const { from, to, begin, end } of step) table[from][to] += end - begin;
    return table;
  }

  const total = (numbers) => numbers.reduce((sum, each) => sum + each, 0);
  const busiest = (table) => Math.max(...table.map(total));

  /* What leaves each node for other nodes. */
  function leaving(table, perNode) {
    const out = new Array(table.length / perNode).fill(0);
    const node = (rank) => Math.floor(rank / perNode);
    table.forEach((row, from) => row.forEach((amount, to) => {
      if (node(from) !== node(to)) out[node(from)] += amount;
    }));
    return out;
  }

  /* The least that the busiest of n ranks (or nodes) sends, per element of the tensor. */
  const limit = (n) => (2 * (n - 1)) / n;

  return { schedule, play, sent, total, busiest, leaving, limit };
});
