// Workflows in the page: opened, made small, queued as the button does, followed to their end.
import { readFile, readdir } from "node:fs/promises";

const SOURCES = new URL("../../workflows/", import.meta.url);

/** The text of a shipped workflow. */
export const source = (name) => readFile(new URL(`${name}.json`, SOURCES), "utf8");

/** The names of the shipped workflows, without those that open in App mode: graphs of these again. */
export const names = async () =>
  (await readdir(SOURCES)).filter((file) => /^[^.]+\.json$/.test(file)).map((file) => file.slice(0, -5)).sort();

/** Open the template browser at the pack's own part; once more where it closed again while it was filled. */
export async function browseTemplates(page) {
  for (let left = 2; ; left--) {
    await page.evaluate(() => window.app.extensionManager.command.execute("Comfy.BrowseTemplates"));
    try {
      await page.getByText("anygpu", { exact: true }).first().click({ timeout: 60000 });
      return;
    } catch (error) {
      if (!left) throw error;
    }
  }
}

/** What the template browser says of our workflows, in its order. */
export const described = JSON.parse(await readFile(new URL("../../web/templates.json", import.meta.url), "utf8"));

/** The card of a workflow in the template browser. */
const templateCard = (page, name) => page.getByText(described.find((row) => row.name === name).title, { exact: true }).first();

/** The card of a workflow, after scrolling to where the template browser fills it in. */
export async function scrolledTo(page, name) {
  await page.mouse.move(900, 600);
  for (let left = 20; left && !(await templateCard(page, name).count()); left--) {
    await page.mouse.wheel(0, 900);
    await page.waitForTimeout(300);
  }
  return templateCard(page, name);
}

/** Open a shipped workflow from the template browser, as a user does. */
export async function openTemplate(page, name) {
  const { nodes } = JSON.parse(await source(name));
  await page.evaluate(() => window.app.graph.clear());
  await browseTemplates(page);
  await (await scrolledTo(page, name)).click();
  await page.waitForFunction((count) => window.app.graph._nodes.length === count, nodes.length);
}

/** A new graph of nodes in a row: each its type, its widgets' values, and [earlier node, output] by input. */
export async function graphOf(page, nodes) {
  await page.evaluate((list) => {
    const { app, LiteGraph } = window;
    app.graph.clear();
    const made = [];
    let left = 0;
    for (const [type, values, links] of list) {
      const node = LiteGraph.createNode(type);
      app.graph.add(node);
      for (const widget of node.widgets ?? []) if (widget.name in values) widget.value = values[widget.name];
      for (const [input, [from, output]] of Object.entries(links ?? {})) {
        const slot = made[from].outputs.findIndex(({ name }) => name === output);
        made[from].connect(slot, node, node.inputs.findIndex(({ name }) => name === input));
      }
      node.pos = [left, 0];
      left += node.size[0] + 60;
      made.push(node);
    }
  }, nodes);
}

/** Make the open painting workflow small enough for tiny checkpoints on a CPU; a second pass takes twice the first. */
export async function shrinkPainting(page) {
  await page.evaluate(
    (wanted) => {
      for (const node of window.app.graph._nodes) {
        for (const widget of node.widgets ?? []) if (widget.name in wanted) widget.value = wanted[widget.name];
        if (node.title === "Second pass") node.widgets.find(({ name }) => name === "view_size").value = 2 * wanted.view_size;
      }
    },
    { view_size: 64, size: 128, texture_size: 256, resolution: 256, steps: 2, frames: 6 },
  );
}

/** Make the open workflow small enough for tiny checkpoints on a CPU, and change what else is asked. */
export async function shrink(page, values = {}) {
  const small = { width: 256, height: 160, frames: 25, steps: 8, clip_seconds: 0.8, window: 2, max_tokens: 512 };
  await page.evaluate(
    (wanted) => {
      for (const node of window.app.graph._nodes.filter(({ type }) => /^(AnyGPU|Empty|KSampler|PrimitiveInt)/.test(type))) {
        for (const widget of node.widgets ?? []) {
          if (widget.name in wanted) widget.value = wanted[widget.name];
          if (widget.name === "length") widget.value = wanted.frames; // of core's empty latents
          if (widget.name === "fit") widget.value = "crop";
        }
      }
    },
    { ...small, ...values },
  );
}

/** Start listening to the server's events of the next run. */
export async function listen(page) {
  await page.evaluate(() => {
    window.seen = { progress: [], texts: [], under: {}, previews: 0, animated: 0, ending: null, message: "", cached: [] };
    if (window.listening) return;
    window.listening = true;
    const api = window.app.api;
    const on = (kind, act) => api.addEventListener(kind, (event) => act(event.detail));
    on("progress", ({ value, max }) => window.seen.progress.push([value, max]));
    on("progress_text", ({ nodeId, text }) => {
      window.seen.texts.push(text);
      window.seen.under[nodeId] = text;
    });
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
export async function ended(page, timeout = 300000) {
  await page.waitForFunction(() => window.seen.ending !== null, null, { timeout });
  return page.evaluate(() => window.seen);
}
