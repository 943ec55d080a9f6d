// The inside of a benchmark program on Node: what every system does alike. See benchmarks/program.py for the verbs.

import fs from "node:fs";

export const QUEUE = "bench";
export const IO_MS = 10;
const TEXT = "x".repeat(120);

export const setting = (name, otherwise = "") => process.env[`BENCH_${name}`] ?? otherwise;
// The monotonic clock that all processes of the machine share.
const now = () => Number(process.hrtime.bigint()) / 1e9;
export const payload = (n) => ({ n, text: TEXT });

// Returns the function that handlers call with the number of their job. Standard input closing writes the record
// and ends the process at once.
export function recorder() {
  const step = Number(setting("STEP", "1000"));
  const timed = setting("TIMED") === "1";
  const times = [];
  let numbers = new Uint32Array(1 << 20);
  let count = 0;
  process.stdin.on("end", () => {
    const out = setting("OUT");
    fs.writeFileSync(out, Buffer.from(numbers.buffer, 0, count * 4));
    if (timed) fs.writeFileSync(`${out}.times`, JSON.stringify(times));
    process.exit(0);
  });
  process.stdin.resume();
  return (n) => {
    if (timed) times.push([n, now()]);
    if (count === numbers.length) {
      const more = new Uint32Array(count * 2);
      more.set(numbers);
      numbers = more;
    }
    numbers[count++] = n;
    if (count === 1 || count % step === 0) fs.writeSync(1, `mark ${count} ${now().toFixed(6)}\n`);
  };
}

async function fill(program, count) {
  const first = Number(setting("FIRST", "0"));
  const chunk = Number(setting("CHUNK", "1000"));
  const handle = await program.open();
  const began = performance.now();
  for (let start = first; start < first + count; start += chunk) {
    const size = Math.min(chunk, first + count - start);
    await program.many(handle, Array.from({ length: size }, (_, i) => payload(start + i)));
  }
  console.log(`filled ${((performance.now() - began) / 1000).toFixed(6)}`);
}

async function produce(program, count, gap) {
  const first = Number(setting("FIRST", "0"));
  const handle = await program.open();
  const sent = [];
  let due = performance.now();
  for (let n = first; n < first + count; n++) {
    await new Promise((resolve) => setTimeout(resolve, Math.max(0, due - performance.now())));
    const called = now();
    await program.one(handle, payload(n));
    sent.push([n, called, now()]);
    due += gap * 1000;
  }
  fs.writeFileSync(setting("OUT"), JSON.stringify(sent));
}

export async function main(program) {
  const [verb, count, gap] = process.argv.slice(2);
  if (verb === "work") return program.work(recorder());
  if (verb === "setup") await program.setup();
  else if (verb === "fill") await fill(program, Number(count));
  else if (verb === "produce") await produce(program, Number(count), Number(gap));
  else throw new Error(`${verb} is not a verb of a benchmark program`);
  process.exit(0);
}
