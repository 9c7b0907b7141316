// Every shipped workflow, opened from ComfyUI's template browser and run on tiny checkpoints; classic canvas and
// Nodes 2.0, which must make the same prompt of it. Before and after the run it is tidy: tidy.mjs.
import assert from "node:assert/strict";
import { URL_OF_SERVER, apiPrompt, openPage, settled, showAll } from "./comfy.mjs";
import { chosenModes, report } from "./reporting.mjs";
import { browseTemplates, ended, listen, names, openTemplate, queue, scrolledTo, shrink, shrinkPainting } from "./running.mjs";
import { isTidy, shoot } from "./tidy.mjs";

const NEEDS_MODELS = /^anygpu_paint_from_one_picture$|_on_an_older_gpu$|^anygpu_rescue_a_vae_decode$|_from_files$|_super_resolution$|_two_passes$/; // opened, not run
const COMPOSED = /_from_files$|_super_resolution$|_two_passes$/; // opened only: our own loader has no file that it needs before it runs
const prompts = new Map();
const named = process.argv.slice(2).filter((word) => !word.startsWith("--")); // some of them; all where none is named

/** Run is refused at once, and what core answers names each missing file of the template. */
async function isRefused({ page, errors }, nodes2, name) {
  const missing = await page.evaluate(() => window.app.graph._nodes.flatMap(({ properties }) => (properties.models ?? []).map((model) => model.name)));
  assert.ok(missing.length, `${name} names no file`);
  const answered = page.waitForResponse((response) => response.url().endsWith("/prompt") && response.request().method() === "POST");
  await page.evaluate(() => void window.app.extensionManager.command.execute("Comfy.QueuePrompt"));
  const answer = await answered;
  const text = await answer.text();
  assert.equal(answer.status(), 400, text.slice(0, 200));
  for (const file of missing) assert.ok(text.includes(file), `${name}: the refusal does not name ${file}`);
  await page.waitForTimeout(1500);
  await shoot(page, nodes2, name, "refused");
  errors.splice(0, errors.length, ...errors.filter((error) => !/PromptExecutionError|status of 400/.test(error))); // the refusal
}

async function opensAndRuns(open, nodes2, name) {
  const { page } = open;
  await openTemplate(page, name);
  const prompt = await apiPrompt(page);
  for (const { inputs } of Object.values(prompt)) delete inputs["video-preview"]; // of core's Load Video, once its video is there
  assert.deepEqual(prompt, prompts.get(name) ?? prompt, "the two modes make different prompts");
  prompts.set(name, prompt);
  await showAll(page);
  await isTidy(page, nodes2, name, "before");
  if (NEEDS_MODELS.test(name)) return COMPOSED.test(name) ? undefined : isRefused(open, nodes2, name);
  if (/^anygpu_(paint|project|mv)/.test(name)) await shrinkPainting(page);
  else await shrink(page, { width: 64, height: 64, frames: 9, steps: 2, clip_seconds: 0.3, seed: Date.now() % 1e6 });
  // Without what earlier runs left, every node runs and shows its text.
  await fetch(`${URL_OF_SERVER}/free`, { method: "POST", body: JSON.stringify({ unload_models: true, free_memory: true }) });
  await queue(page);
  const seen = await ended(page, 500000);
  assert.equal(seen.ending, "execution_success", seen.message);
  assert.ok(seen.progress.length > 0 && seen.texts.length > 0, "no progress arrived");
  await isTidy(page, nodes2, name, "after");
}

const APPS = { "anygpu_ltx_text_to_video.app": "a red circle moves left on blue", "anygpu_framepack_image_to_video.app": "it moves up" };

/** A template that opens in App mode: its inputs are there, a prompt that is typed is what runs, and a clip is shown. */
async function runsAsAnApp({ page }, nodes2, name, text) {
  await browseTemplates(page);
  await (await scrolledTo(page, name)).click();
  const widgets = page.getByTestId("linear-widgets");
  await widgets.waitFor();
  const skip = page.getByRole("button", { name: "Skip" });
  if (await skip.isVisible().catch(() => false)) await skip.click(); // the frontend's own tour, at its first app
  await shrink(page, { width: 64, height: 64, frames: 9, steps: 2, clip_seconds: 0.3, seed: Date.now() % 1e6 });
  await widgets.locator("textarea").first().fill(text);
  await listen(page);
  await page.getByTestId("linear-run-button-icon").last().click();
  const seen = await ended(page, 500000);
  assert.equal(seen.ending, "execution_success", seen.message);
  assert.ok(JSON.stringify(await apiPrompt(page)).includes(JSON.stringify(text)), "the prompt that ran is another");
  await page.locator("[data-testid=linear-center-panel] video").first().waitFor({ timeout: 60000 });
  await shoot(page, nodes2, name, "after");
  await page.evaluate(() => window.app.extensionManager.command.execute("Comfy.ToggleLinear"));
  await settled(page);
  await shoot(page, nodes2, name, "graph");
  const hidden = await page.evaluate(() => {
    const { graph, ds, visible_area: [left, top, width, height] } = window.app.canvas;
    const inside = ({ boundingRect: [x, y, wide, high] }) => x >= left && y >= top && x + wide <= left + width && y + high <= top + height;
    return ds.scale < 0.5 ? [`a scale of ${ds.scale}`] : graph._nodes.filter((node) => !inside(node)).map(({ title }) => title);
  });
  assert.deepEqual(hidden, [], "its graph is out of view");
}

const opened = (nodes2) => openPage({ nodes2, bypassCSP: true }); // or ComfyUI forbids its own preview to read a GLB, as in paint.mjs

for (const nodes2 of chosenModes()) {
  const check = report(nodes2);
  const faults = [];
  /** A check whose failure is told at once and does not end the others. */
  const tried = (title, act) =>
    check(title, act).catch(({ message }) => {
      console.log(`not ok  ${title}: ${message}`);
      faults.push(title);
    });
  const graphs = named.length ? named.filter((each) => !(each in APPS)) : await names();
  if (graphs.length) {
    const open = await opened(nodes2);
    try {
      for (const name of graphs) await tried(`template ${name}`, () => opensAndRuns(open, nodes2, name));
      assert.deepEqual(open.errors, [], "the page reported errors");
    } finally {
      await open.browser.close();
    }
  }
  for (const [name, text] of Object.entries(APPS)) {
    if (named.length && !named.includes(name)) continue;
    const open = await opened(nodes2); // each its own: the template browser is not opened from App mode, which the app before leaves
    try {
      await tried(`app ${name}`, () => runsAsAnApp(open, nodes2, name, text));
      assert.deepEqual(open.errors, [], "the page reported errors");
    } finally {
      await open.browser.close();
    }
  }
  assert.deepEqual(faults, [], "see above for what is wrong with these");
}
