/* What happens if two ranks call different collectives, as measured on gloo with two CPU ranks (a
   test measures it again). The n-th call of one rank pairs with the n-th call of the other: names
   play no part, because no message contains them.

   A pair is "right" (the same tensor), "mixed" (different tensors of one length and dtype, combined
   without an error), "garbled" (no error, and a rank has numbers that mean nothing), "hang", a
   "mismatch" (a rank waits, or gloo aborts its process), an "error" on both ranks (with DETAIL), or
   "unreached". A run that ends is "wrong" if any pair was mixed or garbled.

   A queue is written as calls joined by dots: "ra12f.bw3h.s" is an all-reduce of a1 (2 float32),
   a broadcast of w (3 float16) from rank 0, and a barrier. */
(function (root, make) {
  if (typeof module === "object") module.exports = make();
  else (root.FigureLogic ??= {}).two_queues = make();
})(this, function () {
  "use strict";

  const OPS = { r: "all_reduce", b: "broadcast", s: "barrier" };
  const DTYPES = { f: "float32", h: "float16", b: "bfloat16" };
  const BYTES = { float32: 4, float16: 2, bfloat16: 2 };
  const VALUES = { a1: 1, b1: 2, a2: 3, b2: 4, a3: 5, b3: 6, c: 7, w: 9 };
  const TOKEN = /^([rb])(a1|b1|a2|b2|a3|b3|c|w)([1-9])([fhb])$/;

  /* A queue from its text; unknown calls are left out, because an address can be typed by hand. */
  function parse(text) {
    return text.split(".").filter((token) => token === "s" || TOKEN.test(token)).map((token) => {
      if (token === "s") return { op: "barrier", name: "", length: 0, dtype: "float32" };
      const [, op, name, length, dtype] = token.match(TOKEN);
      return { op: OPS[op], name, length: Number(length), dtype: DTYPES[dtype] };
    });
  }

  function write(queue) {
    const letter = (table, value) => Object.keys(table).find((key) => table[key] === value);
    return queue
      .map((call) => call.op === "barrier"
        ? "s"
        : letter(OPS, call.op) + call.name + call.length + letter(DTYPES, call.dtype))
      .join(".");
  }

  const nbytes = (call) => (call.op === "barrier" ? 0 : call.length * BYTES[call.dtype]);
  const value = (call, rank) => (call.op === "barrier" ? 0 : VALUES[call.name] * 10 ** rank);

  function outcomeOf(here, there, detail) {
    if (here.op === "barrier" && there.op === "barrier") return { outcome: "right", results: [0, 0] };
    const sameKind =
      here.op === there.op && nbytes(here) === nbytes(there) && here.dtype === there.dtype;
    if (detail && !sameKind) return { outcome: "error", results: [null, null] };
    if (here.op !== there.op) return { outcome: "hang", results: [null, null] };
    if (sameKind) {
      const mine = value(here, 0);
      const both = here.op === "all_reduce" ? mine + value(there, 1) : mine;
      return { outcome: here.name === there.name ? "right" : "mixed", results: [both, both] };
    }
    if (here.op === "broadcast") {
      return nbytes(here) <= nbytes(there)
        ? { outcome: "garbled", results: [value(here, 0), null] }
        : { outcome: "mismatch", results: [null, null] };
    }
    const readable = nbytes(here) === nbytes(there) && BYTES[here.dtype] === BYTES[there.dtype];
    return { outcome: readable ? "garbled" : "mismatch", results: [null, null] };
  }

  function pairUp(first, second, detail) {
    const pairs = [];
    let stopped = null;
    for (let position = 0; position < Math.max(first.length, second.length); position++) {
      if (stopped) {
        pairs.push({ outcome: "unreached", results: [null, null] });
        continue;
      }
      const paired = position < Math.min(first.length, second.length);
      pairs.push(paired
        ? outcomeOf(first[position], second[position], detail)
        : { outcome: "hang", results: [null, null] });
      const { outcome } = pairs[position];
      if (["hang", "mismatch", "error"].includes(outcome)) stopped = outcome;
    }
    const silent = pairs.some(({ outcome }) => outcome === "mixed" || outcome === "garbled");
    return { pairs, end: stopped ?? (silent ? "wrong" : "right") };
  }

  /* Hangs and mix-ups of the book, as [name, queue of rank 0, queue of rank 1]. */
  const presets = () => [
    ["a gradient is missing", "ra12f.rb12f.ra22f.rb22f.ra32f.rb32f", "rb12f.rb22f.rb32f"],
    ["one head per rank", "ra12f.ra22f", "rb12f.rb22f"],
    ["another order", "ra12f.rb12f.rc3f", "rb12f.ra12f.rc3f"],
    ["another size", "ra12f.rc3f", "rc3f.ra12f"],
    ["one batch more", "ra12f.ra22f.ra32f.s", "ra12f.ra22f.s"],
    ["rank 0 evaluates", "bw2f.ra12f.bw2f.s", "bw2f.ra12f.s"],
    ["fp16 and bf16", "ra12h.rb12h", "ra12b.rb12b"],
    ["all right", "ra12f.rb12f.ra22f.rb22f.ra32f.rb32f", "ra12f.rb12f.ra22f.rb22f.ra32f.rb32f"],
  ];

  const names = { ops: Object.values(OPS), dtypes: Object.values(DTYPES), tensors: Object.keys(VALUES) };
  return { parse, write, value, pairUp, presets, names };
});
