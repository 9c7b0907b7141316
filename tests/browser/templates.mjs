// Every shipped workflow, opened from ComfyUI's template browser and run on tiny checkpoints; classic canvas and
// Nodes 2.0, which must make the same prompt of it. Before and after the run it is tidy: tidy.mjs.
import assert from "node:assert/strict";
import { URL_OF_SERVER, apiPrompt, openPage, showAll } from "./comfy.mjs";
import { chosenModes, report } from "./reporting.mjs";
import { ended, names, openTemplate, queue, shrink, shrinkPainting } from "./running.mjs";
import { isTidy } from "./tidy.mjs";

const NEEDS_MODELS = /^anygpu_paint_from_one_picture$|_on_an_older_gpu$|^anygpu_rescue_a_vae_decode$|_from_files$/; // opened, not run
const prompts = new Map();
const named = process.argv.slice(2).filter((word) => !word.startsWith("--")); // some of them; all where none is named

async function opensAndRuns({ page }, nodes2, name) {
  await openTemplate(page, name);
  const prompt = await apiPrompt(page);
  for (const { inputs } of Object.values(prompt)) delete inputs["video-preview"]; // of core's Load Video, once its video is there
  assert.deepEqual(prompt, prompts.get(name) ?? prompt, "the two modes make different prompts");
  prompts.set(name, prompt);
  await showAll(page);
  await isTidy(page, nodes2, name, "before");
  if (NEEDS_MODELS.test(name)) return;
  if (name.startsWith("anygpu_paint")) await shrinkPainting(page);
  else await shrink(page, { width: 64, height: 64, frames: 9, steps: 2, clip_seconds: 0.3, seed: Date.now() % 1e6 });
  // Without what earlier runs left, every node runs and shows its text.
  await fetch(`${URL_OF_SERVER}/free`, { method: "POST", body: JSON.stringify({ unload_models: true, free_memory: true }) });
  await queue(page);
  const seen = await ended(page, 500000);
  assert.equal(seen.ending, "execution_success", seen.message);
  assert.ok(seen.progress.length > 0 && seen.texts.length > 0, "no progress arrived");
  await page.waitForTimeout(2000);
  await isTidy(page, nodes2, name, "after");
}

for (const nodes2 of chosenModes()) {
  const check = report(nodes2);
  const open = await openPage({ nodes2, bypassCSP: true }); // or ComfyUI forbids its own preview to read a GLB, as in paint.mjs
  const faults = [];
  try {
    for (const name of named.length ? named : await names()) {
      await check(`template ${name}`, () => opensAndRuns(open, nodes2, name)).catch(({ message }) => {
        console.log(`not ok  template ${name}: ${message}`);
        faults.push(name);
      });
    }
    assert.deepEqual(faults, [], "see above for what is wrong with these");
    assert.deepEqual(open.errors, [], "the page reported errors");
  } finally {
    await open.browser.close();
  }
}
