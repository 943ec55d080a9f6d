// graphile-worker's program; the settings are explained in graphile.py.

import { Logger, makeWorkerUtils, run } from "graphile-worker";
import { IO_MS, QUEUE, main, setting } from "./program.mjs";

const logger = new Logger(() => (level, message) => level === "error" && console.error(message));
const io = setting("MODE") === "io";

const preset = {
  worker: {
    connectionString: setting("DSN"),
    maxPoolSize: 10,
    concurrentJobs: io ? 500 : 96,
    pollInterval: 2000,
    localQueue: { size: 1000 },
    completeJobBatchDelay: 0,
    failJobBatchDelay: 0,
    logger,
  },
};

await main({
  async setup() {
    const utils = await makeWorkerUtils({ connectionString: setting("DSN"), logger });
    await utils.migrate();
    await utils.release();
  },
  async open() {
    return makeWorkerUtils({ connectionString: setting("DSN"), maxPoolSize: 1, logger });
  },
  async many(utils, payloads) {
    await utils.addJobs(payloads.map((p) => ({ identifier: QUEUE, payload: p })));
  },
  async one(utils, p) {
    await utils.addJob(QUEUE, p);
  },
  async work(note) {
    const handler = io
      ? async (p) => {
          note(p.n);
          await new Promise((resolve) => setTimeout(resolve, IO_MS));
        }
      : async (p) => note(p.n);
    const runner = await run({ preset, taskList: { [QUEUE]: handler }, noHandleSignals: true });
    await runner.promise;
  },
});
