// Running the open workflow in the page: made small, queued as the button does, followed to its end.
import { readFile } from "node:fs/promises";

const SOURCES = new URL("../../workflows/", import.meta.url);

/** The text of a shipped workflow. */
export const source = (name) => readFile(new URL(`${name}.json`, SOURCES), "utf8");

/** Make the open workflow small enough for tiny checkpoints on a CPU, and change what else is asked. */
export async function shrink(page, values = {}) {
  const small = { width: 256, height: 160, frames: 25, steps: 8, clip_seconds: 0.8, window: 2, max_tokens: 512 };
  await page.evaluate(
    (wanted) => {
      for (const node of window.app.graph._nodes.filter((each) => each.type.startsWith("AnyGPU"))) {
        for (const widget of node.widgets ?? []) {
          if (widget.name in wanted) widget.value = wanted[widget.name];
          if (widget.name === "fit") widget.value = "crop";
        }
      }
    },
    { ...small, ...values },
  );
}

/** Start listening to the server's events of the next run. */
async function listen(page) {
  await page.evaluate(() => {
    window.seen = { progress: [], texts: [], previews: 0, animated: 0, ending: null, message: "", cached: [] };
    if (window.listening) return;
    window.listening = true;
    const api = window.app.api;
    const on = (kind, act) => api.addEventListener(kind, (event) => act(event.detail));
    on("progress", ({ value, max }) => window.seen.progress.push([value, max]));
    on("progress_text", ({ text }) => window.seen.texts.push(text));
    on("b_preview", () => {
      window.seen.previews += 1;
    });
    on("executed", ({ output }) => {
      if (output?.animated?.[0]) window.seen.animated += 1;
    });
    on("execution_cached", ({ nodes }) => {
      window.seen.cached = nodes;
    });
    for (const kind of ["execution_success", "execution_error", "execution_interrupted"]) {
      on(kind, (detail) => {
        Object.assign(window.seen, {
          ending: kind,
          message: detail?.exception_message ?? "",
          endedAt: performance.now(),
        });
      });
    }
  });
}

/** Press Run the way the button does. */
export async function queue(page) {
  await listen(page);
  await page.evaluate(() => window.app.extensionManager.command.execute("Comfy.QueuePrompt"));
}

/** What was seen of the run, once it has ended. */
export async function ended(page, timeout = 120000) {
  await page.waitForFunction(() => window.seen.ending !== null, null, { timeout });
  return page.evaluate(() => window.seen);
}
