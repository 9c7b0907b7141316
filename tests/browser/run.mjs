// Shipped workflows in ComfyUI's real frontend: found in the template browser, run, watched, cancelled, made to fail;
// classic canvas and Nodes 2.0. With --pictures it also writes the README's screenshots into docs/images/.
import assert from "node:assert/strict";
import { mkdir, readFile, readdir } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { URL_OF_SERVER, graphBottom, loadWorkflow, openPage, showAll } from "./comfy.mjs";

const SOURCES = new URL("../../workflows/", import.meta.url);
const IMAGES = new URL("../../docs/images/", import.meta.url);
const PICTURES = process.argv.includes("--pictures");
const names = (await readdir(SOURCES))
  .filter((file) => file.endsWith(".json"))
  .map((file) => file.slice(0, -5))
  .sort();

const source = (name) => readFile(new URL(`${name}.json`, SOURCES), "utf8");

/** Make the open workflow small enough for tiny checkpoints on a CPU, and change what else is asked. */
async function shrink(page, values = {}) {
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
    window.seen = { progress: [], texts: [], previews: 0, ending: null, message: "", cached: [] };
    if (window.listening) return;
    window.listening = true;
    const api = window.app.api;
    const on = (kind, act) => api.addEventListener(kind, (event) => act(event.detail));
    on("progress", ({ value, max }) => window.seen.progress.push([value, max]));
    on("progress_text", ({ text }) => window.seen.texts.push(text));
    on("b_preview", () => {
      window.seen.previews += 1;
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
async function queue(page) {
  await listen(page);
  await page.evaluate(() => window.app.extensionManager.command.execute("Comfy.QueuePrompt"));
}

async function ended(page, timeout = 120000) {
  await page.waitForFunction(() => window.seen.ending !== null, null, { timeout });
  return page.evaluate(() => window.seen);
}

/**
 * A screenshot for the README, when they are wanted.
 * `quiet` waits until the notices at the right edge are gone; `height` of the page in pixels, down to the lowest node
 * where it is not given.
 */
async function picture(page, name, { quiet = true, height = 0 } = {}) {
  if (!PICTURES || !name) return;
  await mkdir(IMAGES, { recursive: true });
  if (quiet) await page.waitForTimeout(6000);
  const { width, height: whole } = page.viewportSize();
  const shown = height || Math.min(whole, Math.ceil(await graphBottom(page)) + 50);
  await page.screenshot({ path: fileURLToPath(new URL(name, IMAGES)), clip: { x: 0, y: 0, width, height: shown } });
}

async function check(title, act) {
  const started = Date.now();
  await act();
  console.log(`ok  ${title} (${((Date.now() - started) / 1000).toFixed(1)} s)`);
}

async function templates({ page }) {
  await page.evaluate(() => window.app.extensionManager.command.execute("Comfy.BrowseTemplates"));
  await page.getByText("anygpu", { exact: true }).first().click();
  for (const name of names) await page.getByText(name.replaceAll("_", " ")).or(page.getByText(name)).first().waitFor();
  await picture(page, "templates.png", { height: 900 });
  await page.getByText("ltx_text_to_video").or(page.getByText("ltx text to video")).first().click();
  await page.waitForFunction(() => window.app.graph._nodes.some((node) => node.type === "AnyGPUSample"));
}

async function runs({ page }, name, values) {
  await loadWorkflow(page, await source(name), name);
  await showAll(page);
  await shrink(page, values);
  await queue(page);
  const seen = await ended(page);
  assert.equal(seen.ending, "execution_success", seen.message);
  assert.ok(seen.progress.length > 3 && seen.texts.length > 3, "no progress arrived");
  await page.waitForFunction(
    () => {
      const video = [...document.querySelectorAll("video")].find((each) =>
        /SaveVideo|video/.test(each.src + each.innerHTML),
      );
      return video && video.videoWidth === 256;
    },
    null,
    { timeout: 20000 },
  );
}

async function watches({ page }, shot) {
  await shrink(page, { seed: 7, steps: 900 });
  await queue(page);
  await page.waitForFunction(() => window.seen.progress.some(([value, max]) => max === 900 && value >= 300), null, {
    timeout: 60000,
  });
  await picture(page, shot, { quiet: false });
  assert.equal((await ended(page)).ending, "execution_success");
}

async function cancels({ page }) {
  await shrink(page, { seed: 8, steps: 1000, width: 512, height: 320, frames: 49 });
  await queue(page);
  await page.waitForFunction(() => window.seen.progress.some(([value, max]) => max === 1000 && value >= 3), null, {
    timeout: 60000,
  });
  // Timed in the page, which also draws without a GPU here: hence two seconds. That the server obeys within one is
  // the business of tests/host/test_cancel.py.
  const started = await page.evaluate(() => {
    const now = performance.now();
    void window.app.extensionManager.command.execute("Comfy.Interrupt");
    return now;
  });
  const seen = await ended(page);
  assert.equal(seen.ending, "execution_interrupted");
  assert.ok(seen.endedAt - started < 2000, `cancel took ${seen.endedAt - started} ms`);
  await shrink(page, { seed: 9 });
  await queue(page);
  assert.equal((await ended(page)).ending, "execution_success");
}

async function fails({ page }, shot) {
  await shrink(page, { seed: 10, text: " " });
  await queue(page);
  const seen = await ended(page);
  assert.equal(seen.ending, "execution_error");
  assert.equal(seen.message.trim(), "an empty prompt; expected a text that describes the video. Type a prompt.");
  await page.getByRole("button", { name: "View details" }).click();
  await page.getByText("expected a text that describes the video").first().waitFor();
  await page.waitForTimeout(500);
  await picture(page, shot, { quiet: false, height: 690 }); // above the stack trace
  await page.evaluate(() => window.app.extensionManager.setting.set("Comfy.RightSidePanel.IsOpen", false));
}

for (const nodes2 of [false, true]) {
  const mode = nodes2 ? "Nodes 2.0" : "classic canvas";
  // Without what earlier runs left, every node runs and shows its text.
  await fetch(`${URL_OF_SERVER}/free`, {
    method: "POST",
    body: JSON.stringify({ unload_models: true, free_memory: true }),
  });
  const open = await openPage({ nodes2 });
  const shot = (name) => (nodes2 ? null : name);
  try {
    if (!nodes2) await check("every workflow is in the template browser", () => templates(open));
    await check(`${mode}: LTX-Video text to video runs to a video`, () => runs(open, "ltx_text_to_video", { seed: 1 }));
    await picture(open.page, shot("ltx_text_to_video.png"));
    await check(`${mode}: progress and preview are shown`, () => watches(open, shot("progress.png")));
    await check(`${mode}: Cancel is obeyed and the next run works`, () => cancels(open));
    await check(`${mode}: an error says what to do`, () => fails(open, shot("error.png")));
    await check(`${mode}: FramePack image to video runs to a video`, () =>
      runs(open, "framepack_image_to_video", { seed: 1 }),
    );
    await picture(open.page, nodes2 ? "framepack_nodes2.png" : "framepack_image_to_video.png");
    assert.deepEqual(open.errors, [], "the page reported errors");
  } finally {
    await open.browser.close();
  }
}
