// pg-boss's program; the settings are explained in pgboss.py.

import { PgBoss } from "pg-boss";
import { IO_MS, QUEUE, main, setting } from "./program.mjs";

const io = setting("MODE") === "io";

function boss(options) {
  const made = new PgBoss({ connectionString: setting("DSN"), ...options });
  made.on("error", (error) => console.error(error));
  return made;
}

await main({
  async setup() {
    const made = boss({});
    await made.start();
    await made.createQueue(QUEUE, { notify: true });
    await made.stop({ graceful: false });
  },
  async open() {
    const made = boss({ max: 1, supervise: false, schedule: false });
    await made.start();
    return made;
  },
  async many(made, payloads) {
    await made.insert(QUEUE, payloads.map((data) => ({ data })));
  },
  async one(made, data) {
    await made.send(QUEUE, data);
  },
  async work(note) {
    const made = boss({ max: 10, useListenNotify: true, schedule: false });
    await made.start();
    const options = {
      batchSize: io ? 125 : 1000,
      localConcurrency: 4,
      burstWhenBatchFull: true,
      pollingIntervalSeconds: 0.5,
    };
    await made.work(QUEUE, options, async (jobs) => {
      for (const job of jobs) note(job.data.n);
      if (io) await Promise.all(jobs.map(() => new Promise((resolve) => setTimeout(resolve, IO_MS))));
    });
  },
});
